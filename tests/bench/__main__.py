"""`python -m tests.bench`."""

from tests.bench.cli import main

if __name__ == "__main__":
    main()
