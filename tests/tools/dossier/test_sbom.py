import json
import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cyclonedx", reason="the extra 'dossier' is not installed")

from tools.dossier import sbom

ROOT = Path(__file__).parents[3]


def bundle(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    text = "\n".join(["--only-binary :all:", "--require-hashes", *lines, ""])
    (folder / "requirements-3.11.txt").write_text(text)
    return folder


HASH = f"--hash=sha256:{'ab' * 32}"


def test_a_bundle_is_described_by_its_hashed_requirements(tmp_path: Path) -> None:
    wheel = "./wheels/scikit_learn-1.9.1-cp311-cp311-manylinux_2_28_aarch64.whl"
    text = sbom.of_bundle(bundle(tmp_path, f"{wheel} {HASH}", f"NumPy==2.4.6 {HASH}"), "0.1.0")
    found = {entry["name"]: entry for entry in json.loads(text)["components"]}
    assert {name: entry["version"] for name, entry in found.items()} == {
        "scikit-learn": "1.9.1",
        "numpy": "2.4.6",
    }
    assert found["numpy"]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]


def test_an_unreadable_requirement_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected NAME==VERSION"):
        sbom.of_bundle(bundle(tmp_path, f"./numpy {HASH}"), "0.1.0")


def test_differences_name_added_removed_and_changed_components(tmp_path: Path) -> None:
    old = sbom.of_bundle(bundle(tmp_path, f"a==1 {HASH}", f"b==1 {HASH}", f"c==1 {HASH}"), "1")
    new = sbom.of_bundle(bundle(tmp_path, f"a==1 {HASH}", f"b==2 {HASH}", f"d==1 {HASH}"), "2")
    digest = "ab" * 6
    assert sbom.differences(old, new) == [
        f"b: 1 {digest} -> 2 {digest}",
        f"c: 1 {digest} -> absent",
        f"d: absent -> 1 {digest}",
    ]
    assert not sbom.differences(old, old)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_sbom_of_the_environment_names_the_direct_dependencies() -> None:
    pytest.importorskip("cyclonedx_py", reason="the extra 'dossier' is not installed")
    assert {"numpy", "tuf", "msgspec"} <= sbom.components(sbom.of_environment()).keys()


@pytest.mark.slow
def test_a_built_wheel_contains_its_sbom_and_another_build_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (sbom.build_wheel(tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    text = sbom.of_wheel(first)
    assert json.loads(text)["metadata"]["component"]["name"] == "edge-fl"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[^a-z0-9-]", line)[0] for line in needed} == sbom.components(text).keys()
