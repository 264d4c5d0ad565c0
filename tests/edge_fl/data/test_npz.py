"""An .npz is read completely, or rejected with its real fault."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_fl.errors import DataError
from edge_fl.files import npz

LIMITED = """
import resource, sys
from pathlib import Path
from edge_fl.files import npz
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    npz.read(Path(sys.argv[1]))
except MemoryError as error:
    print("MemoryError", error)
"""


def test_arrays_that_do_not_fit_into_memory_are_not_called_damaged(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "large.npz", x=np.zeros((2000, 400, 400), np.uint8))
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "large.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"MemoryError {tmp_path / 'large.npz'}: Unable to allocate 305. MiB")


def test_a_header_that_announces_more_than_the_file_holds_is_damage(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (2**50, 8, 8)}
    )
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(DataError, match=r"x\.npz: not a readable .npz \(damaged: Unable to allocate"):
        npz.read(tmp_path / "x.npz")
