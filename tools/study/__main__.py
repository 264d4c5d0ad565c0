"""`python -m tools.study`."""

import logging

from tools.study.cli import main

logging.getLogger("edge_fl_server").setLevel(logging.ERROR)  # of this process only: tests call `main`
main()
