"""Which release and which agent software a device has, and which ones its server has offered, as far as its folder tells."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from edge_fl import __version__
from edge_fl.errors import ArtefactError
from edge_fl.release import agent
from edge_fl_devices.storage import read_json
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store

TARGETS = "tuf/metadata/targets.json"
"""The trusted metadata with all signed releases, which python-tuf has verified before it wrote them."""
MAX_SUMMARY = 250
"""Characters; Home Assistant takes a few more."""


class Versions(Struct, frozen=True, omit_defaults=True):
    """The state of an `update` entity of Home Assistant; `release_summary`: why the latest version is not installed, if it failed."""

    installed_version: str
    latest_version: str
    release_summary: str = ""


class _Signed(Struct, frozen=True):
    agents: tuple[str, ...] = ()


class _Targets(Struct, frozen=True):
    signed: _Signed = _Signed()


def of_release(folder: Path, predicting: int) -> Versions:
    """The release that predicts and the one that the server offered last; before it is known, that of the release slots."""
    slots = Slots(folder / "release")
    offered = Store(folder).memory().offered
    if not offered:
        current = slots.current()
        offered = current.manifest.release if current else predicting
    failed = slots.blocked.get(offered, "")
    summary = f"Release {offered} failed on this device: {failed}"[:MAX_SUMMARY] if failed else ""
    return Versions(str(predicting), str(offered), summary)


def of_agent(folder: Path) -> Versions:
    """The version of the agent that ran last, else of this program, and the offered one; the installed one again while it is not known."""
    memory = Store(folder).memory()
    installed = memory.agent or __version__
    known = {release.number: release.version for release in _signed(folder)}
    return Versions(installed, known.get(memory.offered_agent, installed))


def _signed(folder: Path) -> list[agent.AgentRelease]:
    found = read_json(folder / TARGETS, _Targets) or _Targets()
    try:
        return agent.listed(found.signed.agents)
    except ArtefactError:  # of a later version
        return []
