"""Run `tuf-conformance` (theupdateframework/tuf-conformance, an external checkout) against the device's TUF client."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

CLIENT = Path(__file__).with_name("tuf_client.py")
XFAILS = CLIENT.with_name(f"{CLIENT.name}.xfails")
DEADLINE_S = 570


@dataclass(frozen=True)
class Conformance:
    """Names of the failed tests and of the expected failures, and how many passed."""

    passed: int
    failed: tuple[str, ...]
    explained: tuple[str, ...]


def reasons() -> dict[str, str]:
    """The reason of each expected failure by test name: the comment lines above it."""
    found, comment = {}, ""
    for line in XFAILS.read_text().splitlines():
        if line.startswith("#"):
            comment = f"{comment} {line.removeprefix('#').strip()}".strip()
        elif line:
            found[line] = comment
        else:
            comment = ""
    return found


def run(checkout: Path, folder: Path) -> Conformance:
    """Run the suite; its output and JUnit report are written to `folder`. Raises ValueError if it is not a checkout."""
    suite = checkout.absolute() / "tuf_conformance"
    if not suite.is_dir():
        raise ValueError(f"{checkout}: no tuf_conformance in it; expected a checkout of the test suite")
    report = folder.absolute() / "tuf-conformance.xml"
    above = os.pathsep.join([str(checkout.absolute()), *filter(None, sys.path)])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(checkout / "pyproject.toml"),
        "--rootdir",
        str(checkout),
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            f"--junitxml={report}",
            str(suite),
            "--entrypoint",
            str(CLIENT),
        ],
        env={**os.environ, "PYTHONPATH": above, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    (folder / "tuf-conformance.txt").write_text(done.stdout + done.stderr)
    return read(report)


def read(report: Path) -> Conformance:
    """Read a JUnit report."""
    passed, failed, explained = 0, [], []
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = case.get("name", "")
        if kinds & {"failure", "error"}:
            failed.append(name)
        elif "skipped" in kinds:
            explained.append(name)
        else:
            passed += 1
    return Conformance(passed, tuple(failed), tuple(explained))
