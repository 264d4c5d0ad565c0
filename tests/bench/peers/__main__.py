"""`python -m tests.bench.peers`."""

from tests.bench.peers.cli import main

if __name__ == "__main__":
    main()
