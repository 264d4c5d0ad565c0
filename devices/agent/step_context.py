"""One step of an agent in the making: the state as it becomes, and the effects so far. It lives as long as one call of `step`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from msgspec import Struct

from devices.agent import outbox
from devices.agent.effects import Effect, Publish, Remember
from devices.agent.outbox import Parcel
from devices.agent.state import AgentState
from edge_fl.wire.messages import DeviceState, Log

REMEMBERED_WANTS = 64
LOG_EXPIRY_S = 60


class StepContext:
    """What the handlers of an event change and ask for."""

    def __init__(self, state: AgentState, now_s: float) -> None:
        self.state, self.now_s = state, now_s
        self.effects: list[Effect] = []

    def set(self, **changes: Any) -> None:
        """Changes fields of the state."""
        self.state = replace(self.state, **changes)

    def do(self, *effects: Effect) -> None:
        """Asks for effects, in this order."""
        self.effects += effects

    def publish(
        self, topic: str, message: Struct, *, retain: bool = False, expiry_s: int | None = None
    ) -> None:
        """Says `message`, counted."""
        self.set(sequence=self.state.sequence + 1)
        self.do(Publish(topic, message, retain, expiry_s))

    def say_status(self) -> None:
        """Publishes the status."""
        state = self.state
        self.set(said=(state.status, state.activity, state.release, state.reason))
        sequence = state.sequence + 1
        status = DeviceState(state.status, state.boot, sequence, state.activity, state.release, state.reason)
        self.publish(state.topics.state(state.device), status, retain=True)

    def log(self, level: Literal["info", "warning"], text: str) -> None:
        """A line for whoever watches the fleet, if there is a link; only what happens seldom is worth one."""
        if self.state.connected:
            self.publish(self.state.topics.log(self.state.device), Log(level, text), expiry_s=LOG_EXPIRY_S)

    def remember(self, **changes: Any) -> None:
        """Changes what survives a restart."""
        memory = replace(self.state.memory, **changes)
        if memory != self.state.memory:
            self.set(memory=memory)
            self.do(Remember(memory))

    def done(self, id: str) -> None:
        """The report on the want `id` was acknowledged."""
        if id not in self.state.memory.done:
            self.remember(done=(*self.state.memory.done, id)[-REMEMBERED_WANTS:])

    def give_up(self, id: str) -> None:
        """The want `id` is not worked on again, unless the server asks anew."""
        if id not in self.state.memory.given_up:
            self.remember(given_up=(*self.state.memory.given_up, id)[-REMEMBERED_WANTS:])

    def reconsider(self, id: str) -> None:
        """The want `id` may be worked on again, as if for the first time."""
        memory = self.state.memory
        self.remember(
            done=tuple(known for known in memory.done if known != id),
            given_up=tuple(known for known in memory.given_up if known != id),
        )

    def post(self, parcel: Parcel) -> None:
        """Puts a report into the outbox."""
        self.set(outbox=outbox.put(self.state.outbox, parcel, self.now_s))
