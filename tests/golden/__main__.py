"""`python -m tests.golden [METHOD ...]` records the golden numbers again, by default of all methods; review the diff."""

import sys

from edge_fl.methods import names
from tests.golden import record

for name in sys.argv[1:] or names():
    record.write(name)
    sys.stdout.write(f"{record.path_of(name).name}\n")
