"""Releases of the agent's own software, which the signed metadata list like those of extractors, and the messages about them.

    targets.json: {"signed": {"agents": [AgentRelease as JSON text, ...], ...}}

A field of its own: every target is the manifest of an extractor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from zipfile import ZipInfo

import msgspec
from msgspec import Meta, Struct

from edge_fl.blob import Blob
from edge_fl.console import units
from edge_fl.errors import ArtefactError, brief
from edge_fl.failures import Failure
from edge_fl.fields import ServerSignature
from edge_fl.untrusted import NOT_JSON, decoder

FIELD = "agents"
Number = Annotated[int, Meta(ge=0, le=2**40)]
Text = Annotated[str, Meta(max_length=400)]
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 1 << 30


class AgentWheel(Struct, frozen=True):
    """One wheel: its file name, bytes, and what its metadata requires (`Requires-Dist` without extras, `Requires-Python`).

    `unpacked`: the bytes of its files (`unpacked_bytes`), the most that a device unpacks.
    """

    file: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+!]*(-[A-Za-z0-9_.+!]+){4,5}\.whl\Z")]
    blob: Blob
    unpacked: Annotated[int, Meta(ge=0, le=2**40)]
    requires: Annotated[list[Text], Meta(max_length=128)] = []
    requires_python: Text = ""


class AgentRelease(Struct, frozen=True):
    """The agent release `number`: a wheel of edge-fl and those of dependencies that devices may lack.

    Only with `downgrade` may a device replace a newer version by it. A device that runs a `withdrawn` release may return to an earlier one.
    """

    number: Annotated[int, Meta(ge=1)]
    version: Annotated[str, Meta(max_length=64)]
    wheels: Annotated[list[AgentWheel], Meta(min_length=1, max_length=64)]
    downgrade: bool = False
    withdrawn: bool = False


class AgentUpdate(Struct, frozen=True):
    """dn/agent, retained: the agent release `number` that a device should run (0: that of its installation), requested under `id`."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]
    number: Number
    signature: ServerSignature | None = None


class UpdateStatus(Struct, frozen=True):
    """Part of a capability: the agent release `number` that runs (0: the installation), and how far the update `id` got.

    `state`: "idle", "declined" or "postponed" by the owner, "fetching", "installing", "testing", "trial", "done" or "failed"; `why`: the
    failure word, or what it waits for.
    """

    number: Number
    id: Annotated[str, Meta(pattern=r"^[a-z0-9-]{0,64}\Z")] = ""
    state: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")] = "idle"
    why: Annotated[str, Meta(max_length=2000)] = ""


def encode(release: AgentRelease) -> str:
    """Encode as JSON text, which the canonical JSON of signed metadata contains as it is."""
    return msgspec.json.encode(release).decode()


def listed(entries: object) -> list[AgentRelease]:
    """Decode the field `agents`, by number. Raises ArtefactError."""
    try:
        texts = entries if isinstance(entries, Iterable) else []
        releases = [decoder(AgentRelease).decode(text) for text in texts]
    except (TypeError, *NOT_JSON) as error:
        raise ArtefactError(
            f"signed metadata: agent release: {brief(error)}",
            Failure.MANIFEST,
            "no agent release can be read",
        ) from error
    return sorted(releases, key=lambda release: release.number)


def unpacked_bytes(name: str, files: Iterable[ZipInfo]) -> int:
    """The bytes of all files of a wheel. Raises ArtefactError ("bad_wheel") above the limits of any wheel.

    This is signed, and a device checks it before and while it unpacks: a file of 100 KB can unpack to 100 MB. Python's zipfile yields at
    most the size that an archive states for each file, so this sum, which counts overlapping files too, is the most that can come out.
    """
    sizes = [file.file_size for file in files]
    if len(sizes) > MAX_FILES or sum(sizes) > MAX_UNPACKED_BYTES:
        raise ArtefactError(
            f"{name}: {len(sizes):,} files of {units.size(sum(sizes))}; expected at most {MAX_FILES:,} of"
            f" {units.size(MAX_UNPACKED_BYTES)}",
            Failure.BAD_WHEEL,
        )
    return sum(sizes)
