"""Worker processes start wherever the folder for temporary files is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

POOL = """
import os
from multiprocessing import util
from edge_fl_server.training.engines import processes

if __name__ == "__main__":
    assert processes.pool(1).submit(os.getpid).result() != os.getpid()
    print(util.get_temp_dir())
"""


def test_a_long_name_of_the_temporary_folder_does_not_matter(tmp_path: Path) -> None:
    long = tmp_path / ("temporary-" * 12)
    long.mkdir()
    script = tmp_path / "script.py"
    script.write_text(POOL)
    variables = os.environ | {"TMPDIR": str(long), "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists() and not list(long.iterdir())
