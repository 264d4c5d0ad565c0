"""`python -m tools.bench.scale`."""

from tools.bench.scale.cli import main

main()
