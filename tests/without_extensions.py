"""Run the core's tests as if no extension were installed: EDGE_FL_WITHOUT_EXTENSIONS=1, set by `make core`.

A folder on PYTHONPATH holds this distribution's metadata without the extensions' entry points, and a `sitecustomize` that bans their
import packages, so that commands and children that a test starts have neither. tests/conftest.py does the same in pytest's process.
"""

import atexit
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

VARIABLE = "EDGE_FL_WITHOUT_EXTENSIONS"
EXTENSIONS = ("edge_fl_maker", "edge_fl_lab", "edge_fl_console")
BAN = f"""
import sys

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTENSIONS!r}:
            raise ModuleNotFoundError(f"{{name}} is an extension, which is blocked here", name=name)

sys.meta_path.insert(0, Ban())
"""


def block() -> None:
    """Block the extensions in this process and in all that it starts from now on."""
    folder = Path(tempfile.mkdtemp(prefix="without-extensions-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    folder.chmod(0o755)  # tests run programs as other accounts
    (folder / "sitecustomize.py").write_text(BAN)
    installed = metadata.distribution("edge-fl")
    info = folder / f"edge_fl-{installed.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(installed.read_text("METADATA") or "")
    points = (installed.read_text("entry_points.txt") or "").splitlines()
    kept = [line for line in points if not any(f"= {name}" in line for name in EXTENSIONS)]
    (info / "entry_points.txt").write_text("\n".join(kept))
    exec(BAN, {})
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
