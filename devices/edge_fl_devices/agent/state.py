"""The state of an agent as one frozen value, what is derived from it (status, activity, next wake-up), and what changes it in a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import Struct

from edge_fl.blob import Blob
from edge_fl.config import MethodSpec
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import (
    Activity,
    Assignment,
    Capability,
    DeviceState,
    Log,
    Round,
    ServerState,
    Status,
)
from edge_fl.wire.topics import Topics
from edge_fl_devices.agent import outbox
from edge_fl_devices.agent.effects import REMEMBERED_ASSIGNMENTS, Effect, Memory, Publish, Remember
from edge_fl_devices.agent.outbox import Outbox

LOG_EXPIRY_S = 60


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Time-outs and retries of an agent.

    settle_s: wait for retained messages on a broker that returns no echo. resend_s: pause before an unacknowledged report is sent
    again. retry_s: pause after a failure, doubled each time up to max_retry_s. max_kills: how often work is begun whose child process
    is ended by a signal each time. grace_s: how long reports are kept at least after
    the server returns; return_s: the time over which devices send them then. offline_s: how long a device waits for a broker, and what it
    may be assigned there, before it fits a head without one.
    """

    settle_s: float = 2.0
    resend_s: float = 10.0
    resend_bytes_per_s: float = 1e6
    retry_s: float = 2.0
    max_retry_s: float = 300.0
    max_tries: int = 3
    max_kills: int = 6
    head_report_s: float = 86_400.0
    return_s: float = 1.0
    grace_s: float = 30.0
    offline_s: float = 5.0


LIMITS = AgentLimits()
CALM = frozenset(word for word in Failure if word.calm)


class Phase(Enum):
    """Connection phase. SETTLING: connected, retained messages are still arriving."""

    OFFLINE = "offline"
    SETTLING = "settling"
    UP = "up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Work:
    """The one piece of work under way. `fetching` is the current blob, `to_fetch` the next ones; `cancelled`: drop the result."""

    assignment: Assignment
    activity: Activity
    due_s: float = math.inf
    spec: MethodSpec | None = None
    manifest: Manifest | None = None
    fetching: Blob | None = None
    to_fetch: tuple[Blob, ...] = ()
    bytes_down: int = 0
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class AgentState:
    """State of one agent.

    release: the release that the device serves. installed: the one that a head would be fitted on (0: none). why: the current failure.
    published: what the last status message contained.
    settled_s, echo: settling ends at this time or with this echo, whichever comes first. alone_at_s: if there is no broker until this
    time, the device fits heads on its own.
    assignment_due_s, tries, not_before_s: of the current assignment or refit; not_before_s is infinite while only new data, another
    assignment or a restart can help. outdated: the broker retained an older assignment than this device has. refit: the data changed
    since the head was fitted.
    demoted, over_budget, data_problem, impaired: like drift, conditions of the device that its own work cannot end.
    """

    device: str
    boot: str
    topics: Topics
    capability: Capability
    limits: AgentLimits = LIMITS
    memory: Memory = field(default_factory=Memory)
    outbox: Outbox = ()
    release: int = 0
    installed: int = 0
    phase: Phase = Phase.OFFLINE
    alone_at_s: float = -math.inf
    born: bool = False
    settled_s: float = math.inf
    echo: str = ""
    sequence: int = 0
    why: str = ""
    published: tuple[Status, Activity, int, str] | None = None
    server: ServerState | None = None
    rounds: Mapping[str, Round] = field(default_factory=dict)
    assignment: Assignment | None = None
    outdated: bool = False
    assignment_due_s: float = math.inf
    tries: int = 0
    not_before_s: float = -math.inf
    refit: bool = False
    demoted: str = ""
    over_budget: str = ""
    data_problem: str = ""
    impaired: str = ""
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
        if self.phase is Phase.STOPPED:
            return "disconnected"
        if self.phase is not Phase.UP:
            return "init"
        fault = self.why and self.why not in CALM
        return "alert" if fault or self.data_problem or self.impaired else "ready"

    @property
    def reason(self) -> str:
        """`why` of the status message: the condition that causes all else, or the current failure."""
        if self.phase is Phase.STOPPED:
            return self.why
        conditions = self.demoted or self.over_budget or self.data_problem or self.impaired
        noticed = Failure.DRIFT if self.capability.drift else ""
        return conditions or self.why or (Failure.PROMISE_BROKEN if self.capability.missed else noticed)

    @property
    def activity(self) -> Activity:
        if self.work:
            return self.work.activity
        return "reporting" if self.outbox else "idle"

    def settled(self, assignment: Assignment) -> bool:
        """Return whether nothing is left to do for an assignment but to deliver its report.

        A release may be assigned again after it was done, by a rollback.
        """
        if assignment.id in self.memory.given_up or outbox.find(self.outbox, assignment.id):
            return True
        return assignment.id in self.memory.done and (
            assignment.mode != "serve" or assignment.release == self.release
        )

    @property
    def pending(self) -> Assignment | None:
        """The current assignment, if no work on it has begun."""
        if self.assignment and not self.work and not self.settled(self.assignment):
            return self.assignment
        return None

    @property
    def wants_refit(self) -> bool:
        """Whether the head must be fitted again because the data changed."""
        return self.refit and self.tier is Tier.HEAD

    @property
    def refit_on(self) -> int:
        """The release that a refit is on; 0: none."""
        return self.installed or self.release

    @property
    def may_refit_alone(self) -> bool:
        """Whether a head is to be fitted without a broker. A download that waits for one gives way; other work ends first."""
        free = self.work is None or (self.work.fetching is not None and not self.work.cancelled)
        offline = self.phase is Phase.OFFLINE and free and not self.over_budget
        return offline and self.wants_refit and self.refit_on > 0

    @property
    def may_begin(self) -> bool:
        """Whether the device is free to begin work, with a broker."""
        free = self.phase is Phase.UP and not self.work
        return free and not self.over_budget and self.why != Failure.UNSUPPORTED_PROTO


def wake_at(state: AgentState) -> float:
    """Return when the agent next needs a tick, on the clock of `now_s`; infinity if only events can change its state."""
    offline = state.phase is Phase.OFFLINE
    times = [entry.due_s for entry in state.outbox if not (offline and outbox.waits(entry))]
    if state.work and not state.work.cancelled:
        times.append(state.work.due_s)
    if state.pending:
        times.append(state.assignment_due_s)
    if state.phase is Phase.SETTLING:
        times.append(state.settled_s)
    if state.may_begin and (state.pending or state.wants_refit) and math.isfinite(state.not_before_s):
        times.append(state.not_before_s)
    if state.may_refit_alone:
        times.append(max(state.not_before_s, state.alone_at_s))
    if state.phase is Phase.UP and state.server_online:
        times += [entry.next_s for entry in state.outbox]
    return min(times, default=math.inf)


class StepContext:
    """What the event handlers change: `state` and `effects`."""

    def __init__(self, state: AgentState, now_s: float) -> None:
        self.state, self.now_s = state, now_s
        self.effects: list[Effect] = []

    def update(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def publish(
        self, topic: str, message: Struct, *, retain: bool = False, expiry_s: int | None = None
    ) -> None:
        """Publish `message` and count it in `sequence`."""
        self.update(sequence=self.state.sequence + 1)
        self.emit(Publish(topic, message, retain, expiry_s))

    def publish_status(self) -> None:
        """Publish the status if it differs from the last one published."""
        state = self.state
        content = (state.status, state.activity, state.release, state.reason)
        if state.published == content:
            return
        self.update(published=content)
        message = DeviceState(
            state.status, state.boot, state.sequence + 1, state.activity, state.release, state.reason
        )
        self.publish(state.topics.up(state.device, "state"), message, retain=True)

    def log(self, level: Literal["info", "warning"], text: str) -> None:
        """Publish a log line, if connected; only for rare events."""
        if self.state.connected:
            self.publish(
                self.state.topics.up(self.state.device, "log"), Log(level, text), expiry_s=LOG_EXPIRY_S
            )

    def remember(self, **changes: Any) -> None:
        """Change what survives a restart."""
        memory = msgspec.structs.replace(self.state.memory, **changes)
        if memory != self.state.memory:
            self.update(memory=memory)
            self.emit(Remember(memory))

    def mark_done(self, id: str) -> None:
        """Remember that the report on the assignment `id` was acknowledged."""
        if id not in self.state.memory.done:
            self.remember(done=(*self.state.memory.done, id)[-REMEMBERED_ASSIGNMENTS:])

    def give_up(self, id: str) -> None:
        """Do not work on the assignment `id` again, unless the server assigns it with a higher version."""
        if id not in self.state.memory.given_up:
            self.remember(given_up=(*self.state.memory.given_up, id)[-REMEMBERED_ASSIGNMENTS:])

    def reconsider(self, id: str) -> None:
        """Allow work on the assignment `id` again."""
        memory = self.state.memory
        self.remember(
            done=tuple(known for known in memory.done if known != id),
            given_up=tuple(known for known in memory.given_up if known != id),
        )
