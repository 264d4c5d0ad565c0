"""Effects that an agent requests, as plain values; the runtime carries them out. A comment `-> X | Y` names the events that answer."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from edge_fl.blob import Blob
from edge_fl.config import MethodSpec
from edge_fl.release.agent import AgentUpdate
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import Assignment
from edge_fl_devices.agent.outbox import Parcel

REMEMBERED_ASSIGNMENTS = 64


class Memory(Struct, frozen=True):
    """What an agent remembers across restarts.

    `done`: assignments whose report was acknowledged; `given_up`: assignments that ended without one; `version`: the highest
    assignment version seen of the server `server` (its boot id). `signed`: the highest number of a signed assignment, and `key` the id of
    the key that signed it; once there was one, unsigned messages are rejected. `signed_command`, `signed_update`: the numbers of commands
    and agent updates. `starts` begins the numbers of the device's own signatures; it grows with every start. `agent` is the version of the
    agent that started last; `offered` and `offered_agent` are the releases that the server desired last (0: none, or not known).
    """

    done: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    version: int = 0
    server: str = ""
    signed: int = 0
    signed_command: int = 0
    signed_update: int = 0
    starts: int = 0
    key: str = ""
    agent: str = ""
    offered: int = 0
    offered_agent: int = 0


def without_server(memory: Memory) -> dict[str, Any]:
    """What changes in the memory of a device that follows another server: an assignment is worked on although its id is known, and
    reports that the old one has acknowledged are not sent again.
    """
    return {"done": (), "given_up": (*memory.given_up, *memory.done)[-REMEMBERED_ASSIGNMENTS:]}


class Effect(Struct, frozen=True):
    """Base of all effects."""


class Subscribe(Effect, frozen=True):
    """Subscribe to a topic pattern; its retained messages arrive first."""

    pattern: str
    qos: int = 1


class Unsubscribe(Effect, frozen=True):
    """Unsubscribe from a topic pattern."""

    pattern: str


class SpreadReconnects(Effect, frozen=True):
    """After a lost connection, reconnect at a random time within `over_s`."""

    over_s: float


class Publish(Effect, frozen=True):
    """Publish a message."""

    topic: str
    message: Struct
    retain: bool = False
    expiry_s: int | None = None


class Send(Effect, frozen=True):
    """Send a report, its blob's chunks first; the broker may drop both after `expiry_s`."""

    parcel: Parcel
    expiry_s: int


class Fetch(Effect, frozen=True):
    """Fetch a blob's missing chunks; `keep` stores them on disk, for a release. A broadcast that is still in memory is there at once.
    -> Fetched | Failed
    """

    blob: Blob
    keep: bool


class CancelFetch(Effect, frozen=True):
    """Cancel the fetch under way; no event answers it."""


class Job(Effect, frozen=True):
    """Base of the effects that a worker thread carries out."""


class Refresh(Job, frozen=True):
    """Verify the signed metadata and look up `release`. -> Refreshed | Failed | Interrupted"""

    release: int


class Install(Job, frozen=True):
    """Run the canary of a fetched release and put the release into its slot. -> Installed | Failed"""

    manifest: Manifest


class Fit(Job, frozen=True):
    """Fit the personal head on the installed release's features. -> Finished | Failed"""

    assignment: Assignment
    boot: str
    bytes_down: int


class Train(Job, frozen=True):
    """Train, evaluate, personalise or compare (`assignment.mode`), from the broadcasts fetched. -> Finished | Failed"""

    assignment: Assignment
    spec: MethodSpec
    boot: str
    bytes_down: int


class Remember(Effect, frozen=True):
    """Store the memory."""

    memory: Memory


class Keep(Effect, frozen=True):
    """Store a report until it is acknowledged."""

    parcel: Parcel


class Forget(Effect, frozen=True):
    """Delete the stored report `id`."""

    id: str


class Revoke(Effect, frozen=True):
    """Delete the personal head."""


class Unblock(Effect, frozen=True):
    """Forget which releases failed here."""


class DesireUpdate(Effect, frozen=True):
    """Pursue an update of the agent's own software; None: none is desired."""

    update: AgentUpdate | None


class Stop(Effect, frozen=True):
    """Disconnect cleanly; the last effect of an agent."""
