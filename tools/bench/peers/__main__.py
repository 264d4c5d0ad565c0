"""`python -m tools.bench.peers`."""

from tools.bench.peers.cli import main

if __name__ == "__main__":
    main()
