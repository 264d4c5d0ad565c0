"""`python -m edge_fl`: the command `edge-fl`, where the script itself is not on the path."""

import sys

from edge_fl.cli import main

if __name__ == "__main__":
    sys.exit(main())
