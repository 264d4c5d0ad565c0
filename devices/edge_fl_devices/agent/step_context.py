"""The mutable context of one call of `step`: the state so far and the effects so far."""

import dataclasses
from typing import Any, Literal

import msgspec
from msgspec import Struct

from edge_fl.wire.messages import DeviceState, Log
from edge_fl_devices.agent.effects import Effect, Publish, Remember
from edge_fl_devices.agent.state import AgentState

REMEMBERED_ASSIGNMENTS = 64
LOG_EXPIRY_S = 60


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
        self.publish(state.topics.state(state.device), message, retain=True)

    def log(self, level: Literal["info", "warning"], text: str) -> None:
        """Publish a log line, if connected; only for rare events."""
        if self.state.connected:
            self.publish(self.state.topics.log(self.state.device), Log(level, text), expiry_s=LOG_EXPIRY_S)

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
