"""Requirements are resolved for the Pi's Python by pip's own resolver, whatever Python runs `flash`."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from edge_fl_devices.flash import wheels

FLASHES_FROM = ("3.11", "3.12", "3.13")


def wheel(folder: Path, name: str, version: str, *about: str) -> None:
    """A wheel without code, with these lines of metadata."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *about, ""]
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{info}/METADATA": "\n".join(lines), f"{info}/WHEEL": tags}
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(path, text)


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def interpreter(version: str) -> str | None:
    """A Python of this version, on the path or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = [*pyenv.glob(f"versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    return next((str(each) for each in found if each), None)


@pytest.fixture(params=FLASHES_FROM)
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index in a folder, an edge-fl that needs two of its packages, installed in this Python -> the index."""
    found = sys.executable if sys.version.startswith(request.param) else interpreter(request.param)
    pip = [found or "false", "-m", "pip", "--version"]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip(f"no Python {request.param} with pip here")
    index, site = tmp_path / "index", tmp_path / "site"
    wheel(index, "numbers", "2.0", "Requires-Python: >=3.12")
    wheel(index, "numbers", "1.5", "Requires-Python: >=3.9")
    wheel(index, "numbers", "2.9", "Requires-Python: >=3.9")  # newer than what is installed here
    wheel(
        index,
        "learner",
        "1.0",
        "Requires-Dist: numbers>=1",
        'Requires-Dist: backport; python_version < "3.12"',
    )
    wheel(index, "backport", "0.3", 'Requires-Dist: deeper; python_version < "3.12"')
    wheel(index, "deeper", "0.1")
    wheel(index, "onlywindows", "0.1")
    needs = [
        "learner",
        "numbers>=1.1",
        'deeper; python_version < "3"',
        'onlywindows; sys_platform == "win32"',
    ]
    for name, version, lines in (
        ("edge_fl", "0.1", [f"Requires-Dist: {line}" for line in needs]),
        ("numbers", "1.5" if request.param == "3.11" else "2.0", []),
        ("learner", "1.0", ["Requires-Dist: numbers>=1"]),
    ):
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        about = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]
        (site / f"{name}-{version}.dist-info/METADATA").write_text("\n".join(about))
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(sys, "executable", found)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return index


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("3.11", ["backport==0.3", "deeper==0.1", "learner==1.0", "numbers==1.5"]),
        ("3.13", ["learner==1.0", "numbers==here"]),
    ],
)
def test_versions_exist_for_the_targets_python_whatever_runs_flash(
    here: Path, tmp_path: Path, python: str, expected: list[str]
) -> None:
    lines = wheels._resolve(python, tmp_path / "cache")
    expected = [line.replace("here", metadata.version("numbers")) for line in expected]
    assert [line.partition(" ")[0] for line in lines] == expected
    for line in lines:
        name, _, version = line.partition(" ")[0].partition("==")
        content = (here / f"{name}-{version}-py3-none-any.whl").read_bytes()
        assert line.endswith(f" --hash=sha256:{hashlib.sha256(content).hexdigest()}")
    offline = wheels._download(python, tmp_path / "cache", lines)
    assert [line.split("/")[2].split("-py3")[0].replace("-", "==") for line in offline] == expected
