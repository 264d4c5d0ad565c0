"""`python -m tests.study`."""

from tests.study.cli import main

main()
