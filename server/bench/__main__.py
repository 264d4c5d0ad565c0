"""`python -m server.bench`."""

from server.bench.cli import main

if __name__ == "__main__":
    main()
