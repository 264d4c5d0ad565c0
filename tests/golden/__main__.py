"""`python -m tests.golden [METHOD ...]` writes the golden numbers anew, of all methods when none is named; its diff is the review."""

from __future__ import annotations

import sys

from edge_fl.methods import names
from tests.golden import record

for name in sys.argv[1:] or names():
    record.write(name)
    sys.stdout.write(f"{record.path_of(name).name}\n")
