"""An agent under test with a settable clock, and the messages that the tests deliver to it."""

from typing import Any, TypeVar

from msgspec.structs import replace

from edge_fl.blob import describe
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest
from edge_fl.wire.messages import (
    Ack,
    Assignment,
    Capability,
    Command,
    DeviceState,
    Echo,
    Report,
    Round,
    ServerState,
)
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import Connected
from edge_fl_devices.agent import effects, events
from edge_fl_devices.agent.state import AgentState, wake_at
from edge_fl_devices.agent.step import step

TOPICS = Topics("main")
SPEC = MethodSpec(ModelConfig(), InputSpec((1, 8, 8)), ["a", "b"], MethodConfig(), 0)
DOWN = describe(b"broadcast" * 100)
ONNX = describe(b"extractor" * 100)
MANIFEST = Manifest(
    3, "t", "repper", 5, ONNX, 4, ["a", "b"], SPEC.input, True, "sync", 17, 8, Canary(0, 1, [[0.0]])
)
E = TypeVar("E")


class Agent:
    """An agent with its own clock; `done` collects all effects, `last` those of the latest event."""

    def __init__(self, tier: str = "head", **changes: Any) -> None:
        capability = Capability(tier, "x86_64", "3.12", samples=7)  # type: ignore[arg-type]
        self.state = AgentState("pi-01", "boot-1", TOPICS, capability, **changes)
        self.now_s = 1000.0
        self.last: tuple[effects.Effect, ...] = ()
        self.done: list[effects.Effect] = []

    def on(self, event: events.Event, after_s: float = 0.0) -> tuple[effects.Effect, ...]:
        self.now_s += after_s
        self.state, self.last = step(self.state, event, self.now_s)
        self.done += self.last
        return self.last

    def receive(self, message: Any, retain: bool = False, after_s: float = 0.0) -> tuple[effects.Effect, ...]:
        address = {
            ServerState: Address("server_state"),
            Round: Address("round", path=("t",)),
            Assignment: Address("assignment", "pi-01"),
            Ack: Address("ack", "pi-01"),
            Command: Address("cmd", "pi-01"),
            Echo: Address("echo", "pi-01"),
        }[type(message)]
        return self.on(events.Received(address, message, retain), after_s)

    def up(self, *, online: bool = True) -> "Agent":
        self.on(Connected(session_present=False))
        self.receive(ServerState(online, "server-1"), retain=True)
        self.receive(self.echo(), after_s=0.4)
        return self

    def echo(self) -> Echo:
        """The last echo published."""
        return [
            e.message for e in self.done if isinstance(e, effects.Publish) and isinstance(e.message, Echo)
        ][-1]

    def sleep_until_woken(self) -> tuple[effects.Effect, ...]:
        return self.on(events.Tick(), wake_at(self.state) - self.now_s)

    def statuses(self) -> list[str]:
        return [
            e.message.status
            for e in self.done
            if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
        ]


def only(kind: type[E], found: tuple[effects.Effect, ...]) -> E:
    (one,) = [effect for effect in found if isinstance(effect, kind)]
    return one


def none_of(kind: type, found: tuple[effects.Effect, ...]) -> bool:
    return not any(isinstance(effect, kind) for effect in found)


def train(version: int = 1, round: int = 1, attempt: int = 0, **changes: Any) -> Assignment:
    return replace(Assignment(version, "train", "t", round, f"t-{round}-{attempt}", DOWN), **changes)


def serve(version: int = 1, release: int = 3) -> Assignment:
    return Assignment(version, "serve", "t", 5, f"rel-{release}", release=release)


def report(id: str, kind: str = "update", **changes: Any) -> Report:
    return Report(id, kind, "boot-1", 7, **changes)  # type: ignore[arg-type]


def full_device_at_work() -> Agent:
    device = Agent("full").up()
    device.receive(Round("t", 1, 60, SPEC))
    device.receive(train())
    device.on(events.Fetched(DOWN.sha256, DOWN.bytes))
    return device


def head_device_reporting() -> Agent:
    device = Agent().up()
    device.receive(serve())
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.on(events.Finished(report("rel-3", "head", release=3)))
    return device


def head_device_serving() -> Agent:
    """A device whose head on release 3 is acknowledged."""
    device = head_device_reporting()
    device.receive(Ack("rel-3", "accepted"))
    return device


def new_data(device: Agent, **changes: Any) -> tuple[effects.Effect, ...]:
    """Tell the device that its data changed, with `changes` of its capability."""
    return device.on(events.DataChanged(replace(device.state.capability, **changes)))
