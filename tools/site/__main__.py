"""Build the documentation site: `python -m tools.site [FOLDER]`, by default in build/docs."""

import sys
from pathlib import Path

from tools.site.build import ROOT, build

if __name__ == "__main__":
    site = build(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build/docs")
    sys.stdout.write(f"open {site / 'index.html'}\n")
