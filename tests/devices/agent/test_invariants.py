"""The agent keeps its invariants for random sequences of events."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_fl.failures import Failure
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import (
    Ack,
    Assignment,
    Command,
    DeviceState,
    Round,
    ServerState,
)
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import effects, events
from edge_fl_devices.agent.outbox import REFIT
from edge_fl_devices.agent.state import Phase, wake_at
from tests.devices.agent.agents import DOWN, MANIFEST, ONNX, SPEC, Agent, report

LEGAL = {
    "init": {"init", "ready", "alert", "disconnected"},
    "ready": {"ready", "alert", "init", "disconnected"},
    "alert": {"ready", "alert", "init", "disconnected"},
}
JOBS = (effects.Refresh, effects.Fetch, effects.Install, effects.Fit, effects.Train)
versions, rounds, modes = st.integers(0, 6), st.integers(1, 3), st.sampled_from(["evaluate", "personalise"])
ids = st.sampled_from(["t-1-0", "t-2-1", "t-3-personalise", "rel-1", "rel-2", "rel-3", "rel-9"])
received = st.one_of(
    st.builds(
        ServerState,
        st.booleans(),
        st.sampled_from(["server-1", "server-2"]),
        protocol=st.sampled_from(["1.0", "1.4", "2.0"]),
    ),
    st.builds(lambda r: Round("t", r, 60, SPEC), rounds),
    st.builds(
        lambda v, r, a: Assignment(v, "train", "t", r, f"t-{r}-{a}", DOWN if a else None),
        versions,
        rounds,
        st.integers(0, 1),
    ),
    st.builds(lambda v, r, m: Assignment(v, m, "t", r, f"t-{r}-{m}", DOWN), versions, rounds, modes),
    st.builds(lambda v, r: Assignment(v, "serve", "t", 1, f"rel-{r}", release=r), versions, rounds),
    st.builds(lambda v: Assignment(v, "rest"), versions),
    st.builds(Ack, ids, st.sampled_from(["accepted", "duplicate", "rejected"])),
    st.builds(
        Command, st.just("c1"), st.sampled_from(["rebirth", "abort", "revoke-local-head", "log-level"])
    ),
)
moves = st.one_of(
    st.builds(lambda message, retain: ("receive", message, retain), received, st.booleans()),
    st.sampled_from([("connect", True), ("connect", False), ("drop",), ("wake",), ("metadata",)]),
    st.sampled_from([("data",), ("data",), ("interrupt",)]),
    st.tuples(st.just("wait"), st.floats(0, 200)),
    st.tuples(st.just("answer"), st.sampled_from(["good", "good", "good", "transient", "final"])),
)


def answer(job: effects.Effect, how: str) -> events.Event:
    """A possible result of `job`."""
    if how != "good":
        return events.Failed(Failure.NO_DATA if how == "final" else Failure.CHUNK_HASH)
    match job:
        case effects.Refresh(release):
            return events.Refreshed(
                replace_manifest(release), (ONNX,) if release % 2 else (), installed=release == 2
            )
        case effects.Fetch(blob):
            return events.Fetched(blob.sha256, blob.bytes)
        case effects.Install(manifest):
            return events.Installed(manifest.release)
        case effects.Fit(assignment):
            return events.Finished(report(assignment.id, "head", release=assignment.release))
        case effects.Train(assignment):
            return events.Finished(report(assignment.id))
    raise AssertionError(job)


def outgoing(device: Agent) -> list[str]:
    return [entry.id for entry in device.state.outbox]


def replace_manifest(release: int) -> Manifest:
    return Manifest(
        **{**{name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__}, "release": release}
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["head", "full"]), st.lists(moves, max_size=40))
def test_whatever_happens_the_invariants_hold(tier: str, script: list[tuple[Any, ...]]) -> None:
    device = Agent(tier)
    connected, jobs, statuses, sequence, kept = False, [], ["init"], 0, set()  # type: ignore[var-annotated]
    script = [("connect", False), *script]
    for move in script:
        before = device.state
        acknowledged = None
        match move:
            case ("receive", message, retain) if connected:
                found = device.receive(message, retain)
                acknowledged = message.id if isinstance(message, Ack) and not retain else None
            case ("connect", present) if not connected:
                connected, found = True, device.on(Connected(present))
            case ("drop",) if connected:
                connected, found = False, device.on(Disconnected("gone"))
            case ("wait", seconds):
                found = device.on(events.Tick(), seconds)
            case ("wake",) if wake_at(device.state) < float("inf"):
                found = device.on(events.Tick(), max(0.0, wake_at(device.state) - device.now_s))
                assert wake_at(device.state) > device.now_s, (
                    "an agent that asks for a tick at once would spin"
                )
            case ("metadata",) if connected:
                found = device.on(events.MetadataChanged())
            case ("data",):
                found = device.on(events.DataChanged(device.state.capability))
            case ("interrupt",) if jobs and isinstance(jobs[-1], effects.Refresh):
                jobs.pop()
                found = device.on(events.Interrupted())
            case ("answer", how) if jobs:
                found = device.on(answer(jobs.pop(), how))
            case _:
                continue
        for effect in found:
            if isinstance(effect, effects.CancelFetch):
                assert isinstance(jobs.pop(), effects.Fetch)
            if isinstance(effect, JOBS):
                jobs.append(effect)
            if isinstance(effect, effects.Publish):
                assert connected
            if isinstance(effect, effects.Publish) and isinstance(effect.message, DeviceState):
                statuses.append(effect.message.status)
                assert effect.message.sequence > sequence
                sequence = effect.message.sequence
            if isinstance(effect, effects.Send):
                assert device.state.phase is Phase.UP and device.state.server_online
        assert len(jobs) <= 1, "two pieces of work at once"
        assert bool(jobs) == bool(device.state.work)
        assert device.state.sequence >= before.sequence
        known = {entry.id for entry in before.outbox}
        for waiting in before.outbox:
            gone = waiting.id not in {other.id for other in device.state.outbox}
            replaced = waiting.id.startswith(REFIT) and any(id not in known for id in outgoing(device))
            assert not gone or waiting.id == acknowledged or waiting.due_s <= device.now_s or replaced
        assert sum(id.startswith(REFIT) for id in outgoing(device)) <= 4, "refits pile up"
        for waiting in device.state.outbox:
            assert waiting.id not in kept, "a report that was acknowledged is sent again"
        kept |= (
            {acknowledged}
            if acknowledged in {waiting.id for waiting in before.outbox} and not device.state.refit
            else set()
        )
        assert (
            max(len(device.state.memory.done), len(device.state.memory.given_up)) <= 64
            and len(device.state.rounds) <= 4
        )
    assert all(after in LEGAL[before] for before, after in pairwise(statuses))
    found = device.on(events.StopRequested())
    assert found[-1] == effects.Stop() and device.state.phase is Phase.STOPPED
