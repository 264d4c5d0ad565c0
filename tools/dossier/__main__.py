"""Write the dossier: `python -m tools.dossier [--tuf-conformance DIR] [--previous DIR] [--out DIR]`."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import edge_fl
from tools.dossier import conformance, sbom
from tools.dossier.signature import check_signature

ROOT = Path(__file__).parents[2]
ANNEX = ROOT / "docs/cyber-resilience-act.md"
SBOMS = ("wheel", "flash-bundle", "server-environment")
Row = tuple[str, str, str]  # part, result, files


def main() -> int:
    parser = argparse.ArgumentParser(prog="make dossier")
    parser.add_argument(
        "--tuf-conformance", default="", help="a checkout of theupdateframework/tuf-conformance"
    )
    parser.add_argument("--previous", default="", help="an earlier dossier folder to compare SBOMs with")
    parser.add_argument("--out", type=Path, default=Path("dossier"))
    given = parser.parse_args()
    out: Path = given.out
    previous = {name: _read(Path(given.previous) / f"{name}.cdx.json") for name in SBOMS if given.previous}
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(ANNEX, out / ANNEX.name)
    parts: list[tuple[str, Callable[[], Row]]] = [
        ("TUF conformance", lambda: _conformance(given.tuf_conformance, out)),
        ("model signature", lambda: _signature(out)),
        *((f"SBOM of {name}", lambda name=name: _sbom(name, out, previous.get(name, ""))) for name in SBOMS),  # type: ignore[misc]
    ]
    rows, complete = [], True
    for part, make in parts:
        try:
            rows.append(make())
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            complete = False
            rows.append((part, f"MISSING: {error}", ""))
        print(": ".join(rows[-1][:2]), flush=True)
    rows.append(("Annex I of the Cyber Resilience Act", "see the page", ANNEX.name))
    (out / "index.md").write_text(_index(rows))
    print(out / "index.md")
    return 0 if complete else 1


def _conformance(checkout: str, out: Path) -> Row:
    if not checkout:
        raise ValueError(
            "not run; expected TUF_CONFORMANCE=DIR, a checkout of theupdateframework/tuf-conformance"
        )
    found = conformance.run(Path(checkout), out)
    shutil.copy(conformance.XFAILS, out / "tuf-conformance-exceptions.txt")
    text = f"{found.passed} passed, {len(found.failed)} failed, {len(found.explained)} expected failures, explained"
    if found.failed:
        raise ValueError(f"{text}: {', '.join(found.failed)}")
    return "TUF conformance", text, "tuf-conformance.txt, tuf-conformance.xml, tuf-conformance-exceptions.txt"


def _signature(out: Path) -> Row:
    report = check_signature()
    (out / "model-signature.txt").write_text(report)
    return "model signature", "verified; a changed file is rejected", "model-signature.txt"


def _sbom(name: str, out: Path, previous: str) -> Row:
    text = _make_sbom(name)
    path = out / f"{name}.cdx.json"
    path.write_text(text)
    count = len(sbom.components(text))
    if not previous:
        return f"SBOM of {name}", f"{count} components; no previous dossier", path.name
    changes = sbom.differences(previous, text)
    (out / f"{name}.diff.txt").write_text("".join(f"{line}\n" for line in changes))
    return f"SBOM of {name}", f"{count} components, {len(changes)} changed", f"{path.name}, {name}.diff.txt"


def _make_sbom(name: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        if name == "wheel":
            return sbom.of_wheel(sbom.build_wheel(Path(scratch)))
        if name == "flash-bundle":
            device = ["--id", "pi-00", "--insecure", "--host", "broker.example", "--out", scratch]
            _call("-m", "edge_fl", "flash", *device)
            return sbom.of_bundle(Path(scratch) / "edge-fl", edge_fl.__version__)
        return sbom.of_environment()


def _call(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise ValueError(f"{' '.join(arguments[:3])}: {done.stderr.strip()[-300:]}")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _index(rows: list[Row]) -> str:
    lines = "".join(f"| {part} | {result} | {files} |\n" for part, result, files in rows)
    return (
        f"# Dossier of edge-fl {edge_fl.__version__}, {datetime.now(UTC):%Y-%m-%d}\n\n"
        f"| part | result | files |\n| --- | --- | --- |\n{lines}"
    )


if __name__ == "__main__":
    sys.exit(main())
