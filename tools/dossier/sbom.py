"""SBOMs in CycloneDX: of a flash bundle, of the server environment, of a wheel; and what changed between two of them."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).parents[2]
LINE = re.compile(
    r"(?P<wheel>\./wheels/)?(?P<name>[\w.-]+?)(?:==|-)(?P<version>\d[^\s-]*).*--hash=sha256:(?P<hash>\w+)"
)


def of_bundle(folder: Path, version: str) -> str:
    """Describe a bundle of 'edge-fl flash' by its requirements: each wheel with its version and sha256."""
    bom = Bom()
    bom.metadata.component = whole = Component(
        type=ComponentType.APPLICATION, name="edge-fl-flash-bundle", version=version, bom_ref="bundle"
    )
    files = sorted(folder.glob("requirements-*.txt"))
    lines = {line for file in files for line in file.read_text().splitlines() if "--hash" in line}
    for line in sorted(lines):
        found = LINE.match(line)
        if found is None:
            raise ValueError(f"{line}: expected NAME==VERSION or a wheel, with a hash")
        name = re.sub(r"[-_.]+", "-", found["name"]).lower()
        bom.components.add(
            Component(
                name=name,
                version=found["version"],
                bom_ref=f"{name}@{found['version']}#{found['hash']}",
                purl=PackageURL("pypi", name=name, version=found["version"]),
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=found["hash"])],
            )
        )
    bom.register_dependency(whole, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=2)


def of_environment() -> str:
    """Describe the packages of this Python environment."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-format", "JSON", sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this source tree in `folder`. Raises CalledProcessError."""
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *command], capture_output=True, timeout=600, check=True)
    return next(folder.glob("*.whl"))


def of_wheel(wheel: Path) -> str:
    """The SBOM inside a wheel (PEP 770)."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if ".dist-info/sboms/" in name]
        return content.read(name).decode()


def differences(old: str, new: str) -> list[str]:
    """Components that were added, removed or changed, one line each."""
    before, after = components(old), components(new)
    return [
        f"{name}: {', '.join(before[name]) if name in before else 'absent'}"
        f" -> {', '.join(after[name]) if name in after else 'absent'}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def components(sbom: str) -> dict[str, list[str]]:
    """Versions with hashes by name."""
    found: dict[str, set[str]] = {}
    for component in json.loads(sbom).get("components", []):
        hashes = "".join(f" {entry['content'][:12]}" for entry in component.get("hashes", []))
        found.setdefault(component["name"], set()).add(f"{component.get('version', 'any')}{hashes}")
    return {name: sorted(versions) for name, versions in found.items()}
