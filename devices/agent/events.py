"""What reaches an agent: packets, the clock's ticks and the results of work, all of them plain values.

`Connected` and `Disconnected` come from the transport as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from edge_fl.release.manifest import Manifest
from edge_fl.wire.blob import Blob
from edge_fl.wire.messages import Capability, Report
from edge_fl.wire.topics import Address
from edge_fl.wire.transport import Connected, Disconnected


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the server, decoded; None where the retained one was cleared. `retain` says that the broker had kept it."""

    address: Address
    message: Struct | None
    retain: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed."""


@dataclass(frozen=True, slots=True)
class MetadataChanged:
    """tuf/timestamp.json is new: a release that could not be found may be there now."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The wanted release is authentic and can run here; `missing` has still to be fetched; `installed` says it was here already.

    `bytes` of it came over the wire by now, from a mirror.
    """

    manifest: Manifest
    missing: tuple[Blob, ...] = ()
    installed: bool = False
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A blob is here, whole and verified; `bytes` came over the wire for it (0 when it was here already)."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The release passed its canary and is in its slot."""

    release: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A fit, local update, evaluation or personalisation is done; its results and this report are already in the store."""

    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked for did not happen: `reason` is one of the failure words; `final` says that trying again is of no use."""

    reason: str
    final: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DataChanged:
    """The device's own data are other than before, measured anew."""

    capability: Capability


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The device can do less than before, or as much again; `why` it does less, or ""."""

    capability: Capability
    why: str = ""


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The day's budget is used up, `why` says which; "" when there is a budget again."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Drifted:
    """What the device sees is no longer what its head was fitted on; `score` in standard deviations, 0 when it is again."""

    score: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants this agent to leave in order."""


Event = (
    Connected
    | Disconnected
    | Received
    | Tick
    | MetadataChanged
    | Refreshed
    | Fetched
    | Installed
    | Finished
    | Failed
    | DataChanged
    | TierChanged
    | BudgetChanged
    | Drifted
    | StopRequested
)
