"""Events that reach an agent: packets, clock ticks and the results of work, as plain values.

`Connected` and `Disconnected` are the transport's own.
"""

from __future__ import annotations

from msgspec import Struct

from edge_fl.blob import Blob
from edge_fl.failures import Failure
from edge_fl.fleet.remote_settings import SettingsStatus
from edge_fl.release.agent import UpdateStatus
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import Capability, Report
from edge_fl.wire.topics import Address
from edge_fl.wire.transport import Connected, Disconnected


class AgentEvent(Struct, frozen=True):
    """Base of all events but the transport's."""


class Received(AgentEvent, frozen=True):
    """A decoded message of the server; None if a retained one was cleared. `retain`: the broker had kept it.

    `number` and `key` are those of a valid signature, 0 and "" without one; `rejected` is the failure word of an invalid one.
    """

    address: Address
    message: Struct | None
    retain: bool = False
    number: int = 0
    key: str = ""
    rejected: str = ""


class Tick(AgentEvent, frozen=True):
    """Time has passed."""


class MetadataChanged(AgentEvent, frozen=True):
    """tuf/timestamp.json is new: a release that was missing may be available now."""


class Refreshed(AgentEvent, frozen=True):
    """The assigned release is authentic and can run here.

    `missing` must still be fetched; `installed`: it is installed already; `bytes` were transferred so far, from a mirror.
    """

    manifest: Manifest
    missing: tuple[Blob, ...] = ()
    installed: bool = False
    bytes: int = 0


class Interrupted(AgentEvent, frozen=True):
    """The look-up of a release ended without a result, because the connection broke."""


class Fetched(AgentEvent, frozen=True):
    """A blob is complete and verified; `bytes` were transferred for it (0 if it was there already)."""

    sha256: str
    bytes: int


class Installed(AgentEvent, frozen=True):
    """The release passed its canary and is in its slot."""

    release: int


class Finished(AgentEvent, frozen=True):
    """A fit, local update, evaluation or personalisation succeeded; its results and report are in the store."""

    report: Report


class Failed(AgentEvent, frozen=True):
    """Work failed. `signal` ended the child process, if `reason` is KILLED."""

    reason: Failure
    detail: str = ""
    signal: str = ""


class DataChanged(AgentEvent, frozen=True):
    """The device's own data changed; `capability` is measured again. `why`: the failure word if they could not be read.

    Without `refit` only the count is another one, because a release brought its class list.
    """

    capability: Capability
    why: str = ""
    refit: bool = True


class TierChanged(AgentEvent, frozen=True):
    """The device was demoted, because of `why`, or has recovered (`why` is empty)."""

    capability: Capability
    why: str = ""


class BudgetChanged(AgentEvent, frozen=True):
    """A daily budget is used up, named by `why`; empty when all are available again."""

    why: str = ""


class Drifted(AgentEvent, frozen=True):
    """The features differ from those the head was fitted on, by `score` standard deviations; 0 ends the drift."""

    score: float


class PromiseChecked(AgentEvent, frozen=True):
    """The prediction sets miss the right class more often than promised, of a share `missed` of the newest labels; 0 ends that."""

    missed: float


class Impaired(AgentEvent, frozen=True):
    """A background thread of the agent fails, with the failure word `why`; empty when it works again."""

    why: str = ""


class UpdateChanged(AgentEvent, frozen=True):
    """An update of the agent's own software got further."""

    status: UpdateStatus


class SettingsChanged(AgentEvent, frozen=True):
    """Settings from the operator arrived."""

    status: SettingsStatus


class StopRequested(AgentEvent, frozen=True):
    """The agent must disconnect cleanly and stop; not `planned`: because of an error."""

    planned: bool = True


Event = AgentEvent | Connected | Disconnected
