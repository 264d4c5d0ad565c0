"""What an agent promises, shown without a broker, a clock or a file: events in, effects out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices import agent
from devices.machine import effects, events, outbox
from devices.machine.effects import Memory
from devices.machine.outbox import Parcel, Waiting
from devices.machine.state import AgentState, Limits, Phase, wake_at
from edge_fl.config import InputSpec, MethodConfig, ModelConfig, TaskSpec
from edge_fl.release.manifest import Canary, Manifest
from edge_fl.wire.blob import describe
from edge_fl.wire.messages import (
    Ack,
    Capability,
    Command,
    DeviceState,
    Report,
    Request,
    Round,
    ServerState,
    Want,
)
from edge_fl.wire.topics import Address, Topics
from edge_fl.wire.transport import Connected, Disconnected

TOPICS = Topics("main")
SPEC = TaskSpec(ModelConfig(), InputSpec(1, 8, 8), ["a", "b"], MethodConfig(), 0)
DOWN = describe(b"broadcast" * 100)
ONNX = describe(b"extractor" * 100)
MANIFEST = Manifest(
    3, "t", "repper", 5, ONNX, 4, ["a", "b"], SPEC.input, True, "sync", 17, 8, Canary(0, 1, [[0.0]])
)
E = TypeVar("E")


class Device:
    """An agent under test with a clock of its own; `done` collects every effect, `last` those of the latest event."""

    def __init__(self, tier: str = "head", **changes: Any) -> None:
        capability = Capability(tier, "x86_64", "3.12", samples=7)  # type: ignore[arg-type]
        self.state = AgentState("pi-01", "boot-1", TOPICS, capability, **changes)
        self.now_s = 1000.0
        self.last: tuple[effects.Effect, ...] = ()
        self.done: list[effects.Effect] = []

    def on(self, event: events.Event, after_s: float = 0.0) -> tuple[effects.Effect, ...]:
        self.now_s += after_s
        self.state, self.last = agent.step(self.state, event, self.now_s)
        self.done += self.last
        return self.last

    def hear(self, message: Any, retain: bool = False, after_s: float = 0.0) -> tuple[effects.Effect, ...]:
        address = {
            ServerState: Address("server_state"),
            Round: Address("round", path=("t",)),
            Want: Address("want", "pi-01"),
            Ack: Address("ack", "pi-01"),
            Command: Address("cmd", "pi-01"),
        }[type(message)]
        return self.on(events.Received(address, message, retain), after_s)

    def up(self, *, online: bool = True) -> Device:
        self.on(Connected(session_present=False))
        self.hear(ServerState(online, "server-1"), retain=True)
        self.on(events.Tick(), 0.4)
        return self

    def sleep_until_woken(self) -> tuple[effects.Effect, ...]:
        return self.on(events.Tick(), wake_at(self.state) - self.now_s)

    def said(self) -> list[str]:
        return [
            e.message.status
            for e in self.done
            if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
        ]


def the(kind: type[E], found: tuple[effects.Effect, ...]) -> E:
    (one,) = [effect for effect in found if isinstance(effect, kind)]
    return one


def none_of(kind: type, found: tuple[effects.Effect, ...]) -> bool:
    return not any(isinstance(effect, kind) for effect in found)


def train(version: int = 1, round: int = 1, attempt: int = 0, **changes: Any) -> Want:
    return replace_want(Want(version, "train", "t", round, f"t-{round}-{attempt}", DOWN), **changes)


def replace_want(want: Want, **changes: Any) -> Want:
    return Want(**{**{name: getattr(want, name) for name in want.__struct_fields__}, **changes})


def serve(version: int = 1, release: int = 3) -> Want:
    return Want(version, "serve", "t", 5, f"rel-{release}", release=release)


def report(id: str, kind: str = "update", **changes: Any) -> Report:
    return Report(id, kind, "boot-1", 7, **changes)  # type: ignore[arg-type]


def full_device_at_work() -> Device:
    device = Device("full").up()
    device.hear(Round("t", 1, 60, SPEC))
    device.hear(train())
    device.on(events.Fetched(DOWN.sha256, DOWN.bytes))
    return device


def head_device_reporting() -> Device:
    device = Device().up()
    device.hear(serve())
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.on(events.Finished(report("rel-3", "head", release=3)))
    return device


# Birth


def test_a_birth_subscribes_says_what_it_is_and_is_ready_once_the_retained_messages_are_in() -> None:
    device = Device()
    first = device.on(Connected(session_present=False))
    assert [e.pattern for e in first if isinstance(e, effects.Subscribe)] == [
        "efl/1/main/srv/state",
        "efl/1/main/tuf/timestamp.json",
        "efl/1/main/round/+",
        "efl/1/main/d/pi-01/dn/#",
    ]
    meta, state = [e for e in first if isinstance(e, effects.Publish)]
    assert meta == effects.Publish("efl/1/main/d/pi-01/up/meta", device.state.capability, retain=True)
    assert isinstance(state.message, DeviceState) and state.message.status == "init" and state.retain
    device.sleep_until_woken()
    assert device.said() == ["init", "ready"]


def test_a_device_without_a_want_asks_for_one_once() -> None:
    device = Device().up()
    asked = [e for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Request)]
    assert len(asked) == 1 and asked[0].message.ask == "want" and not asked[0].retain  # type: ignore[attr-defined]


def test_a_device_that_finds_its_want_retained_does_not_ask() -> None:
    device = Device()
    device.on(Connected(session_present=False))
    device.hear(serve(), retain=True)
    device.sleep_until_woken()
    assert not [e for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Request)]
    assert the(effects.Refresh, device.last).release == 3


def test_a_session_that_the_broker_kept_is_not_subscribed_again_but_the_will_is_taken_back() -> None:
    device = Device().up()
    device.on(Disconnected("gone"))
    again = device.on(Connected(session_present=True))
    assert none_of(effects.Subscribe, again)
    assert device.said()[-1] == "init"


def test_a_new_process_subscribes_even_when_the_broker_kept_the_session() -> None:
    assert not none_of(effects.Subscribe, Device().on(Connected(session_present=True)))


def test_the_sequence_counts_every_message_of_a_boot() -> None:
    device = Device().up()
    said = [
        e.message.sequence
        for e in device.done
        if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
    ]
    assert said == [2, 4]  # meta is 1, the request for a want is 3


def test_rebirth_repeats_meta_and_state() -> None:
    device = Device().up()
    device.hear(Command("c1", "rebirth"))
    assert [e.topic[-5:] for e in device.last if isinstance(e, effects.Publish)] == ["/meta", "state"]


def test_a_command_that_was_retained_is_ignored() -> None:
    assert Device().up().hear(Command("c1", "rebirth"), retain=True) == ()


def test_a_clean_stop_says_disconnected_and_nothing_follows() -> None:
    device = Device().up()
    device.on(events.StopAsked())
    assert device.said()[-1] == "disconnected" and device.last[-1] == effects.Stop()
    assert device.on(Connected(session_present=True)) == ()


def test_a_server_of_another_major_version_is_not_obeyed() -> None:
    device = Device().up()
    device.hear(ServerState(True, "server-1", protocol="2.0"))
    assert device.said()[-1] == "alert" and device.state.why == "unsupported_proto"
    assert none_of(effects.Refresh, device.hear(serve()))
    device.hear(ServerState(True, "server-1"))
    assert device.said()[-1] == "ready" and not none_of(effects.Refresh, device.last)


# Training


def test_a_round_is_fetched_trained_reported_and_acknowledged() -> None:
    device = Device("full").up()
    device.hear(Round("t", 1, 60, SPEC))
    assert the(effects.Fetch, device.hear(train())) == effects.Fetch(DOWN, keep=False)
    trained = the(effects.Train, device.on(events.Fetched(DOWN.sha256, 900)))
    assert (trained.want.id, trained.spec, trained.bytes_down) == ("t-1-0", SPEC, 900)
    sent = the(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert (sent.parcel.task, sent.parcel.round, sent.expiry_s) == ("t", 1, 120)
    acknowledged = device.hear(Ack("t-1-0", "accepted"))
    assert the(effects.Forget, acknowledged).id == "t-1-0"
    assert the(effects.Remember, acknowledged).memory.done == ("t-1-0",)
    assert device.state.outbox == ()


def test_training_waits_for_the_round_that_rebuilds_the_method() -> None:
    device = Device("full").up()
    assert none_of(effects.Fetch, device.hear(train()))
    assert not none_of(effects.Fetch, device.hear(Round("t", 1, 60, SPEC)))


def test_training_does_not_begin_while_the_server_is_away() -> None:
    device = Device("full").up(online=False)
    device.hear(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.hear(train()))
    assert not none_of(effects.Fetch, device.hear(ServerState(True, "server-1")))


def test_an_update_may_start_from_nothing() -> None:
    device = Device("full").up()
    device.hear(Round("t", 1, 60, SPEC))
    assert the(effects.Train, device.hear(train(down=None))).bytes_down == 0


def test_a_want_of_a_round_that_is_over_is_not_begun() -> None:
    device = Device("full").up()
    device.hear(Round("t", 2, 60, SPEC))
    assert none_of(effects.Fetch, device.hear(train(round=1)))


def test_an_older_want_is_ignored() -> None:
    device = full_device_at_work()
    device.hear(train(version=5, round=2))
    before = device.state
    assert device.hear(train(version=4, round=9)) == () and device.state == before


def test_an_older_want_is_ignored_after_a_restart() -> None:
    device = Device("full", memory=Memory(version=5, server="server-1")).up()
    device.hear(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.hear(train(version=4)))
    assert not none_of(effects.Fetch, device.hear(train(version=5)))


def test_another_server_counts_from_its_own_beginning() -> None:
    device = Device("full", memory=Memory(version=500, server="an-earlier-server")).up()
    device.hear(Round("t", 1, 60, SPEC))
    assert not none_of(effects.Fetch, device.hear(train(version=1)))


def test_the_same_want_again_is_not_redone_but_its_report_is_sent_again() -> None:
    device = full_device_at_work()
    device.on(events.Finished(report("t-1-0")))
    again = device.hear(train())
    assert the(effects.Send, again).parcel.report.id == "t-1-0" and none_of(effects.Train, again)


def test_a_want_that_was_done_before_a_restart_is_not_redone() -> None:
    device = Device("full", memory=Memory(done=("t-1-0",), version=1, server="server-1")).up()
    device.hear(Round("t", 1, 60, SPEC))
    assert device.hear(train(), retain=True) == ()


def test_a_want_that_was_given_up_is_tried_again_only_when_the_server_asks_anew() -> None:
    device = Device("full", memory=Memory(given_up=("t-1-0",), version=1, server="server-1")).up()
    device.hear(Round("t", 1, 60, SPEC))
    assert device.hear(train(version=1), retain=True) == ()
    assert not none_of(effects.Fetch, device.hear(train(version=2)))


def test_a_want_whose_report_waits_in_the_outbox_after_a_restart_is_not_redone() -> None:
    waiting = Waiting(Parcel("t", 1, report("t-1-0"), 60), 1060, 1000)
    device = Device("full", outbox=(waiting,)).up()
    device.hear(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.hear(train(), retain=True))
    assert len([e for e in device.done if isinstance(e, effects.Send)]) == 1


def test_a_newer_want_ends_a_fetch_at_once() -> None:
    device = Device("full").up()
    device.hear(Round("t", 1, 60, SPEC))
    device.hear(train())
    device.hear(Round("t", 2, 60, SPEC))
    newer = device.hear(train(version=2, round=2))
    assert newer[1] == effects.Abandon() and not none_of(effects.Fetch, newer)


def test_a_newer_want_waits_for_the_worker_and_its_old_result_is_thrown_away() -> None:
    device = full_device_at_work()
    device.hear(Round("t", 2, 60, SPEC))
    assert none_of(effects.Fetch, device.hear(train(version=2, round=2)))
    freed = device.on(events.Finished(report("t-1-0")))
    assert the(effects.Forget, freed).id == "t-1-0" and none_of(effects.Send, freed)
    assert not none_of(effects.Fetch, freed)


def test_rest_drops_what_is_under_way_and_asks_for_nothing() -> None:
    device = full_device_at_work()
    device.hear(Want(2, "rest"))
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert wake_at(device.state) == float("inf")


def test_work_past_its_deadline_is_dropped_and_said() -> None:
    device = full_device_at_work()
    device.sleep_until_woken()
    assert (
        device.now_s == pytest.approx(1120.4)
        and device.said()[-1] == "alert"
        and device.state.why == "deadline"
    )
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert device.hear(train()) == ()


def test_a_want_that_cannot_begin_before_its_deadline_is_given_up() -> None:
    device = Device("full").up(online=False)
    device.hear(train())
    device.sleep_until_woken()
    device.hear(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.hear(ServerState(True, "server-1")))


def test_abort_drops_the_work() -> None:
    device = full_device_at_work()
    device.hear(Command("c1", "abort"))
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert device.hear(train()) == ()


def test_a_head_device_that_is_asked_to_train_says_that_it_cannot() -> None:
    device = Device().up()
    asked = device.hear(train())
    assert the(effects.Send, asked).parcel.report.error == "unsupported_tier"
    assert the(effects.Keep, asked).parcel == device.state.outbox[0].parcel


def test_a_full_device_ignores_serve() -> None:
    device = Device("full").up()
    device.hear(serve())
    assert none_of(effects.Refresh, device.last) and none_of(effects.Send, device.last)


def test_a_training_that_fails_is_tried_thrice_then_reported() -> None:
    device = Device("full", limits=Limits(retry_s=1.0)).up()
    device.hear(Round("t", 1, 60, SPEC))
    device.hear(train())
    for _ in range(2):
        device.on(events.Failed("chunk_hash"))
        assert device.said()[-1] == "alert" and none_of(effects.Fetch, device.last)
        assert not none_of(effects.Fetch, device.sleep_until_woken())
    sent = the(effects.Send, device.on(events.Failed("chunk_hash")))
    assert sent.parcel.report.error == "chunk_hash" and sent.parcel.report.kind == "update"


# Releases


def test_a_release_is_refreshed_fetched_installed_fitted_and_reported() -> None:
    extra = describe(b"head")
    device = Device().up()
    assert the(effects.Refresh, device.hear(serve())).release == 3
    assert the(effects.Fetch, device.on(events.Refreshed(MANIFEST, (ONNX, extra)))) == effects.Fetch(
        ONNX, keep=True
    )
    assert the(effects.Fetch, device.on(events.Fetched(ONNX.sha256, 900))).blob == extra
    assert the(effects.Install, device.on(events.Fetched(extra.sha256, 4))).manifest == MANIFEST
    assert the(effects.Fit, device.on(events.Installed(3))).bytes_down == 904
    finished = device.on(events.Finished(report("rel-3", "head", release=3)))
    assert the(effects.Send, finished).expiry_s == 86_400
    state = [e.message for e in finished if isinstance(e, effects.Publish)][-1]
    assert isinstance(state, DeviceState) and (state.status, state.release) == ("ready", 3)


def test_a_head_that_is_being_fitted_is_reported_though_a_newer_release_is_wanted() -> None:
    device = Device().up()
    device.hear(serve())
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.hear(serve(version=2, release=4))
    finished = device.on(events.Finished(report("rel-3", "head", release=3)))
    assert the(effects.Send, finished).parcel.report.id == "rel-3"
    assert the(effects.Refresh, finished).release == 4


def test_a_release_that_is_overtaken_while_it_is_fetched_is_left_alone() -> None:
    device = Device().up()
    device.hear(serve())
    device.on(events.Refreshed(MANIFEST, (ONNX,)))
    newer = device.hear(serve(version=2, release=4))
    assert effects.Abandon() in newer and the(effects.Refresh, newer).release == 4


def test_a_release_that_is_installed_already_is_only_fitted() -> None:
    device = Device().up()
    device.hear(serve())
    assert not none_of(effects.Fit, device.on(events.Refreshed(MANIFEST, installed=True)))


def test_a_release_is_installed_while_the_server_is_away() -> None:
    assert not none_of(effects.Refresh, Device().up(online=False).hear(serve()))


def test_a_release_whose_metadata_are_late_is_tried_again_when_they_change() -> None:
    device = Device().up()
    device.hear(serve())
    device.on(events.Failed("missing"))
    assert not none_of(effects.Refresh, device.on(events.MetadataChanged(), after_s=0.1))


def test_a_release_is_tried_for_as_long_as_it_is_wanted_with_growing_pauses() -> None:
    device = Device().up()
    device.hear(serve())
    pauses = []
    for _ in range(12):
        device.on(events.Failed("deadline"))
        before_s = device.now_s
        assert not none_of(effects.Refresh, device.sleep_until_woken())
        pauses.append(device.now_s - before_s)
    assert 1.5 <= pauses[0] <= 2.5 and 225 <= pauses[-1] <= 375


def test_a_release_that_failed_its_canary_is_reported_and_not_tried_again() -> None:
    device = Device().up()
    device.hear(serve())
    sent = the(effects.Send, device.on(events.Failed("canary_failed", final=True)))
    assert (sent.parcel.report.error, sent.parcel.report.release) == ("canary_failed", 3)
    device.hear(Ack("rel-3", "accepted"))
    assert device.said()[-1] == "alert" and none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert the(effects.Refresh, device.hear(serve(version=2, release=4))).release == 4


def test_a_rollback_is_a_want_for_a_release_that_was_done_before() -> None:
    device = Device(release=4, memory=Memory(done=("rel-3", "rel-4"))).up()
    assert the(effects.Refresh, device.hear(serve(version=9, release=3))).release == 3
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.on(events.Finished(report("rel-3", "head", release=3)))
    device.hear(Ack("rel-3", "duplicate"))
    assert device.state.release == 3 and none_of(effects.Refresh, device.on(events.Tick(), after_s=60))


def test_a_release_that_is_served_is_not_fitted_again() -> None:
    device = Device(release=3, memory=Memory(done=("rel-3",))).up()
    assert none_of(effects.Refresh, device.hear(serve(version=9, release=3)))


def test_new_data_give_a_device_without_a_head_another_chance() -> None:
    device = Device().up()
    device.hear(serve())
    device.on(events.Failed("no_data", final=True))
    device.hear(Ack("rel-3", "accepted"))
    device.on(events.DataChanged(replace_capability(device.state.capability, samples=8)))
    assert the(effects.Refresh, device.sleep_until_woken()).release == 3


def test_new_data_refit_the_head_of_the_release_that_serves() -> None:
    device = head_device_reporting()
    device.hear(Ack("rel-3", "accepted"))
    device.on(events.DataChanged(replace_capability(device.state.capability, samples=8)))
    assert device.said()[-1] == "init"  # what a device can do changes only at a birth
    fit = the(effects.Fit, device.sleep_until_woken())
    assert fit.want.release == 3 and fit.want.id.startswith("refit-boot-1-")
    device.on(events.Finished(report(fit.want.id, "head", release=3)))
    assert none_of(effects.Fit, device.on(events.Tick(), after_s=1.0))


def replace_capability(capability: Capability, **changes: Any) -> Capability:
    return Capability(
        **{**{name: getattr(capability, name) for name in capability.__struct_fields__}, **changes}
    )


def test_a_revoked_head_is_removed() -> None:
    device = head_device_reporting()
    device.hear(Command("c1", "revoke-local-head"))
    assert not none_of(effects.Revoke, device.last) and device.state.release == 0
    device.hear(Ack("rel-3", "accepted"))
    assert none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert not none_of(effects.Refresh, device.hear(serve(version=2)))


# Outbox


def test_a_report_is_sent_again_until_it_is_acknowledged() -> None:
    device = head_device_reporting()
    pauses = []
    for _ in range(3):
        before_s = device.now_s
        assert the(effects.Send, device.sleep_until_woken()).parcel.report.id == "rel-3"
        pauses.append(device.now_s - before_s)
    assert all(7.5 <= pause <= 12.5 for pause in pauses) and len(set(pauses)) == 3
    device.hear(Ack("rel-3", "duplicate"))
    assert wake_at(device.state) == float("inf")


def test_a_report_is_sent_again_on_reconnect() -> None:
    device = head_device_reporting()
    device.on(Disconnected("gone"))
    device.on(Connected(session_present=True))
    assert not none_of(effects.Send, device.sleep_until_woken())


def test_a_report_waits_while_the_server_is_away_and_outlives_its_deadline_by_a_grace() -> None:
    device = full_device_at_work()
    device.hear(ServerState(False, "server-1"))
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    device.hear(ServerState(True, "server-1"), after_s=119.0)
    assert the(effects.Send, device.sleep_until_woken()).expiry_s in (29, 30, 31)


def test_a_fleet_comes_back_over_as_long_as_the_server_says() -> None:
    waits = []
    for number in range(40):
        device = Device("full")
        device.state = replace(device.state, boot=f"boot-{number}")
        device.up()
        assert the(effects.Spread, device.hear(ServerState(True, "server-1", return_s=60.0))).over_s == 60.0
        assert none_of(effects.Spread, device.hear(ServerState(True, "server-1", return_s=60.0)))
        waiting = outbox.put((), Parcel("t", 1, report("t-1-0"), 120.0), device.now_s)
        device.state = replace(device.state, outbox=waiting)
        device.hear(ServerState(False, "server-1", return_s=60.0))
        device.hear(ServerState(True, "server-2", return_s=60.0))
        waits.append(device.state.outbox[0].next_s - device.now_s)
    assert min(waits) < 10 and max(waits) > 50 and max(waits) <= 60


def test_a_report_past_its_deadline_is_forgotten() -> None:
    device = full_device_at_work()
    device.on(events.Finished(report("t-1-0")))
    device.on(events.Tick(), after_s=120.0)
    assert the(effects.Forget, device.last).id == "t-1-0" and device.state.why == "deadline"


def test_an_acknowledgement_of_something_else_changes_nothing() -> None:
    device = head_device_reporting()
    before = device.state
    assert device.hear(Ack("rel-2", "accepted")) == () and device.state == before


def test_an_acknowledgement_that_was_retained_is_ignored() -> None:
    device = head_device_reporting()
    assert device.hear(Ack("rel-3", "accepted"), retain=True) == () and len(device.state.outbox) == 1


def test_a_parcel_is_in_the_outbox_once() -> None:
    parcel = Parcel("t", 1, report("t-1-0"), 60)
    once = outbox.put((), parcel, 1000)
    assert outbox.put(once, parcel, 1001) == once


def test_what_is_remembered_is_bounded() -> None:
    device = Device("full").up()
    for round in range(100):
        device.hear(Round("t", round, 60, SPEC))
        device.on(events.Received(Address("round", path=(f"t{round}",)), Round(f"t{round}", 1, 60, SPEC)))
        device.hear(train(version=2 * round, round=round, down=None))
        device.on(events.Finished(report(f"t-{round}-0")))
        device.hear(Ack(f"t-{round}-0", "accepted"))
        device.hear(train(version=2 * round + 1, round=round, attempt=1, deadline_s=0.5))
        device.on(events.Tick(), after_s=1.0)
    assert (
        len(device.state.memory.done) == len(device.state.memory.given_up) == 64
        and len(device.state.rounds) == 4
    )


# Any sequence of events

LEGAL = {
    "init": {"init", "ready", "alert", "disconnected"},
    "ready": {"ready", "alert", "init", "disconnected"},
    "alert": {"ready", "alert", "init", "disconnected"},
}
JOBS = (effects.Refresh, effects.Fetch, effects.Install, effects.Fit, effects.Train)

versions, rounds, modes = st.integers(0, 6), st.integers(1, 3), st.sampled_from(["evaluate", "personalise"])
ids = st.sampled_from(["t-1-0", "t-2-1", "t-3-personalise", "rel-1", "rel-2", "rel-3", "rel-9"])
heard = st.one_of(
    st.builds(
        ServerState,
        st.booleans(),
        st.sampled_from(["server-1", "server-2"]),
        protocol=st.sampled_from(["1.0", "1.4", "2.0"]),
    ),
    st.builds(lambda r: Round("t", r, 60, SPEC), rounds),
    st.builds(
        lambda v, r, a: Want(v, "train", "t", r, f"t-{r}-{a}", DOWN if a else None),
        versions,
        rounds,
        st.integers(0, 1),
    ),
    st.builds(lambda v, r, m: Want(v, m, "t", r, f"t-{r}-{m}", DOWN), versions, rounds, modes),
    st.builds(lambda v, r: Want(v, "serve", "t", 1, f"rel-{r}", release=r), versions, rounds),
    st.builds(lambda v: Want(v, "rest"), versions),
    st.builds(Ack, ids, st.sampled_from(["accepted", "duplicate", "rejected"])),
    st.builds(
        Command, st.just("c1"), st.sampled_from(["rebirth", "abort", "revoke-local-head", "log-level"])
    ),
)
moves = st.one_of(
    st.builds(lambda message, retain: ("hear", message, retain), heard, st.booleans()),
    st.sampled_from([("connect", True), ("connect", False), ("drop",), ("wake",), ("metadata",), ("data",)]),
    st.tuples(st.just("wait"), st.floats(0, 200)),
    st.tuples(st.just("answer"), st.sampled_from(["good", "good", "good", "transient", "final"])),
)


def answer(job: effects.Effect, how: str) -> events.Event:
    """What a runner could answer to `job`."""
    if how != "good":
        return events.Failed("chunk_hash", final=how == "final")
    match job:
        case effects.Refresh(release):
            return events.Refreshed(
                replace_manifest(release), (ONNX,) if release % 2 else (), installed=release == 2
            )
        case effects.Fetch(blob):
            return events.Fetched(blob.sha256, blob.bytes)
        case effects.Install(manifest):
            return events.Installed(manifest.release)
        case effects.Fit(want):
            return events.Finished(report(want.id, "head", release=want.release))
        case effects.Train(want):
            return events.Finished(report(want.id))
    raise AssertionError(job)


def replace_manifest(release: int) -> Manifest:
    return Manifest(
        **{**{name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__}, "release": release}
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["head", "full"]), st.lists(moves, max_size=40))
def test_whatever_happens_the_invariants_hold(tier: str, script: list[tuple[Any, ...]]) -> None:
    device = Device(tier)
    connected, jobs, statuses, sequence, kept = False, [], ["init"], 0, set()  # type: ignore[var-annotated]
    script = [("connect", False), *script]
    for move in script:
        before = device.state
        acknowledged = None
        match move:
            case ("hear", message, retain) if connected:
                found = device.hear(message, retain)
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
                    "an agent that is woken and wants to be woken at once spins"
                )
            case ("metadata",) if connected:
                found = device.on(events.MetadataChanged())
            case ("data",):
                found = device.on(events.DataChanged(device.state.capability))
            case ("answer", how) if jobs:
                found = device.on(answer(jobs.pop(), how))
            case _:
                continue
        for effect in found:
            if isinstance(effect, effects.Abandon):
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
        assert len(jobs) <= 1, "two works at once"
        assert bool(jobs) == bool(device.state.work)
        assert device.state.sequence >= before.sequence
        for waiting in before.outbox:
            gone = waiting.id not in {other.id for other in device.state.outbox}
            assert not gone or waiting.id == acknowledged or waiting.due_s <= device.now_s
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
    found = device.on(events.StopAsked())
    assert found[-1] == effects.Stop() and device.state.phase is Phase.STOPPED
