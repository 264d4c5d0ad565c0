"""`python -m server.bench.scale`."""

from server.bench.scale.cli import main

main()
