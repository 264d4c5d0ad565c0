"""Fixtures of the flash tests: an identity with a real key, contents with one tiny wheel, and a filled wheel cache."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from edge_fl_devices.config import DeviceBroker, DeviceConfig
from edge_fl_devices.flash.card_contents import CardContents, read_identity, with_pi_paths
from edge_fl_devices.flash.wheels import Wheelhouse, pins_key
from tests.conftest import Issue


@pytest.fixture
def identity(issue: Issue, tmp_path: Path) -> Path:
    """A folder with the identity of pi-07."""
    folder = tmp_path / "identity"
    folder.mkdir()
    for name, file in zip(("ca.crt", "client.crt", "client.key"), issue("pi-07"), strict=True):
        (folder / name).write_bytes(file.read_bytes())
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture
def contents(identity: Path, tmp_path: Path) -> Callable[[tuple[str, ...]], CardContents]:
    """Contents for pi-07 with the given Python versions and one tiny wheel."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    found = read_identity(identity, "pi-07")
    wanted = DeviceConfig("pi-07", "folder:/srv/images", broker=DeviceBroker("192.168.1.10", 8883))

    def make(pythons: tuple[str, ...]) -> CardContents:
        house = Wheelhouse({python: f"# {python}\n" for python in pythons}, (wheel,))
        return CardContents(with_pi_paths(wanted, identified=True, root=False), house, found)

    return make


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A wheel cache with resolved requirements for both Python versions."""
    cache = tmp_path / "wheels"
    cache.mkdir()
    version = metadata.version("pip")
    (cache / f"pip-{version}").mkdir()
    (cache / f"pip-{version}/pip-{version}-py3-none-any.whl").write_bytes(b"pip")
    for python in ("3.11", "3.13"):
        (cache / f"{python}-{pins_key()}.txt").write_text("numpy==2.0 --hash=sha256:00")
    return cache
