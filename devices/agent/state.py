"""All that an agent knows, as one frozen value, and what follows from it: its status, its activity, when it needs to be woken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from devices.agent import outbox
from devices.agent.effects import Memory
from devices.agent.outbox import Outbox
from edge_fl.capability import Tier
from edge_fl.config import MethodSpec
from edge_fl.release.manifest import Manifest
from edge_fl.wire.blob import Blob
from edge_fl.wire.messages import Activity, Assignment, Capability, Round, ServerState, Status
from edge_fl.wire.topics import Topics


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """How patient an agent is.

    What the broker retains is taken to be in when the agent's echo is back, or after `settle_s` on a broker that gives none.
    A report that is not acknowledged is sent again after `resend_s`, and kept for `grace_s` at least once a server that was away is
    back (`return_s` spreads the devices then). What failed is tried again after `retry_s`, doubled each time up to `max_retry_s`.
    """

    settle_s: float = 2.0
    resend_s: float = 10.0
    resend_bytes_per_s: float = 1e6
    retry_s: float = 2.0
    max_retry_s: float = 300.0
    max_tries: int = 3
    head_report_s: float = 86_400.0
    return_s: float = 1.0
    grace_s: float = 30.0


LIMITS = AgentLimits()


class Phase(Enum):
    """Where the connection stands; SETTLING is connected, but what the broker had retained is still coming in."""

    OFFLINE = "offline"
    SETTLING = "settling"
    UP = "up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Work:
    """The one thing under way. `fetching` is the blob being fetched, `to_fetch` those after it; `dropped`: nobody wants the result."""

    assignment: Assignment
    activity: Activity
    due_s: float = math.inf
    spec: MethodSpec | None = None
    manifest: Manifest | None = None
    fetching: Blob | None = None
    to_fetch: tuple[Blob, ...] = ()
    bytes_down: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class AgentState:
    """`release` is what the device serves, `why` the failure that still stands, `said` what its status message last said.

    `settled_s` and `echo` end the settling, whichever comes first: a time, and what the device said to itself at its birth.
    `want_due_s`, `tries` and `not_before_s` belong to `want`; `refit` says that the device's data changed since its head was fitted.
    `demoted` and `over_budget` are, as drift, conditions of the device that no work of its own can end.
    """

    device: str
    boot: str
    topics: Topics
    capability: Capability
    limits: AgentLimits = LIMITS
    memory: Memory = field(default_factory=Memory)
    outbox: Outbox = ()
    release: int = 0
    phase: Phase = Phase.OFFLINE
    born: bool = False
    settled_s: float = math.inf
    echo: str = ""
    sequence: int = 0
    why: str = ""
    said: tuple[Status, Activity, int, str] | None = None
    server: ServerState | None = None
    rounds: Mapping[str, Round] = field(default_factory=dict)
    assignment: Assignment | None = None
    assignment_due_s: float = math.inf
    tries: int = 0
    not_before_s: float = -math.inf
    refit: bool = False
    demoted: str = ""
    over_budget: str = ""
    work: Work | None = None

    @property
    def tier(self) -> Tier:
        return Tier(self.capability.tier)

    @property
    def connected(self) -> bool:
        return self.phase in (Phase.SETTLING, Phase.UP)

    @property
    def server_online(self) -> bool:
        return self.server is not None and self.server.online

    @property
    def status(self) -> Status:
        """The life cycle, in the words of the wire."""
        if self.phase is Phase.STOPPED:
            return "disconnected"
        if self.phase is not Phase.UP:
            return "init"
        return "alert" if self.why else "ready"

    @property
    def reason(self) -> str:
        """What the status message gives as its reason: the condition that causes all else, or the failure that stands."""
        return self.demoted or self.over_budget or self.why or ("drift" if self.capability.drift else "")

    @property
    def activity(self) -> Activity:
        """What the device is busy with, in the words of the wire."""
        if self.work:
            return self.work.activity
        return "reporting" if self.outbox else "idle"

    def settled(self, assignment: Assignment) -> bool:
        """True if nothing is left to do about a want but, perhaps, to deliver its report.

        A release that was done with once may be wanted again: a rollback is a want for an older one.
        """
        if assignment.id in self.memory.given_up or outbox.find(self.outbox, assignment.id):
            return True
        return assignment.id in self.memory.done and (
            assignment.mode != "serve" or assignment.release == self.release
        )

    @property
    def pending(self) -> Assignment | None:
        """The want that nothing has been done about yet."""
        return (
            self.assignment
            if self.assignment and not self.work and not self.settled(self.assignment)
            else None
        )


def wake_at(state: AgentState) -> float:
    """When the agent next needs a tick, on the clock of `now_s`; infinity if only events can move it."""
    times = [waiting.due_s for waiting in state.outbox]
    if state.work and not state.work.dropped:
        times.append(state.work.due_s)
    if state.pending:
        times.append(state.assignment_due_s)
    if state.phase is Phase.SETTLING:
        times.append(state.settled_s)
    if state.phase is Phase.UP and state.pending and not state.over_budget and math.isfinite(state.not_before_s):
        times.append(state.not_before_s)
    if state.phase is Phase.UP and state.server_online:
        times += [waiting.next_s for waiting in state.outbox]
    return min(times, default=math.inf)
