"""What an agent asks for: plain values that the runner carries out. A comment `-> X | Y` names the events that answer it."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from devices.agent.outbox import Parcel
from edge_fl.config import MethodSpec
from edge_fl.release.manifest import Manifest
from edge_fl.wire.blob import Blob
from edge_fl.wire.messages import Assignment


@dataclass(frozen=True, slots=True)
class Memory:
    """What an agent must not forget when its process ends.

    Wants whose report was acknowledged, wants that it gave up, and how far the server `server` had counted.
    """

    done: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    version: int = 0
    server: str = ""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Listen to a pattern; what is retained under it comes first."""

    pattern: str
    qos: int = 1


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Stop listening to a pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class SpreadReconnects:
    """Come back at a random moment of so many seconds when the connection breaks."""

    over_s: float


@dataclass(frozen=True, slots=True)
class Publish:
    """Say a message on a topic."""

    topic: str
    message: Struct
    retain: bool = False
    expiry_s: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a report, its blob's chunks first; the broker may forget both after `expiry_s`."""

    parcel: Parcel
    expiry_s: int


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the signed metadata and find `release` in it. -> Refreshed | Failed"""

    release: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch a blob's missing chunks; `keep` writes them to the disk, for a release. -> Fetched | Failed"""

    blob: Blob
    keep: bool


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Give up the fetch under way; nothing more comes of it."""


@dataclass(frozen=True, slots=True)
class Install:
    """Check a fetched release in a child process and put it into its slot. -> Installed | Failed"""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Fit:
    """Fit the personal head on the installed release's features. -> Finished | Failed"""

    assignment: Assignment
    boot: str
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Train:
    """Run the method: what `want.mode` says, from the broadcast just fetched. -> Finished | Failed"""

    assignment: Assignment
    spec: MethodSpec
    boot: str
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep, across a restart, which wants are done."""

    memory: Memory


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a report, across a restart, until it is acknowledged."""

    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Forget:
    """The report `id` needs keeping no longer."""

    id: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """Remove the personal head."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Disconnect in order; nothing follows."""


Job = Refresh | Install | Fit | Train
Effect = (
    Subscribe
    | Unsubscribe
    | SpreadReconnects
    | Publish
    | Send
    | Fetch
    | CancelFetch
    | Job
    | Remember
    | Keep
    | Forget
    | Revoke
    | Stop
)
