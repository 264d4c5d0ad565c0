"""`python -m tests.bench.scale`."""

from tests.bench.scale.cli import main

main()
