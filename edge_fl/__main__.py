"""`python -m edge_fl`: the command `edge-fl`, where the script itself is not on the path."""

import sys


def main() -> int:
    """Run the command and return its exit code. Ctrl-C while modules load also gives one line."""
    try:
        from edge_fl.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("edge-fl: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
