"""Without a broker an agent fits heads on the installed release after new data, and keeps the newest report for the next connection."""

import math
from dataclasses import replace

import msgspec
import pytest

from edge_fl.failures import Failure
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import Ack
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import effects, events
from edge_fl_devices.agent.outbox import Parcel, restored
from edge_fl_devices.agent.state import LIMITS, wake_at
from tests.devices.agent.agents import (
    MANIFEST,
    ONNX,
    Agent,
    head_device_reporting,
    head_device_serving,
    new_data,
    none_of,
    only,
    report,
    serve,
)

DAY_S = 86_400.0
LATE_S = LIMITS.offline_s + 1


def fitted(device: Agent, fit: effects.Fit, **changes: object) -> None:
    device.on(events.Finished(report(fit.assignment.id, "head", release=3, extractor=ONNX.sha256, **changes)))


def waiting(device: Agent) -> list[str]:
    return [entry.id for entry in device.state.outbox]


def unplugged() -> Agent:
    """A device with an acknowledged head on release 3, without a broker for some seconds."""
    device = head_device_serving()
    device.on(Disconnected("gone"))
    device.now_s += LATE_S
    return device


def started(**changes: object) -> Agent:
    """A device that starts without a broker."""
    device = Agent(**changes)
    device.state = replace(device.state, alone_at_s=device.now_s + LIMITS.offline_s)
    return device


def test_new_data_without_a_broker_are_fitted_on_the_release_that_serves() -> None:
    device = unplugged()
    fit = only(effects.Fit, new_data(device))
    assert (fit.assignment.release, fit.assignment.version) == (3, 0)
    assert device.state.activity == "fitting" and none_of(effects.Publish, device.last)
    fitted(device, fit)
    assert device.state.release == 3 and waiting(device) == [fit.assignment.id]
    assert none_of(effects.Send, device.last) and wake_at(device.state) == math.inf


@pytest.mark.parametrize("release", [3, 0])
def test_an_agent_that_starts_without_a_broker_waits_for_one_before_it_fits(release: int) -> None:
    """Also on a release without a head: its fit was interrupted, or nothing was labelled yet."""
    device = started(release=release, installed=3)
    assert none_of(effects.Fit, new_data(device))
    assert wake_at(device.state) == device.now_s + LIMITS.offline_s
    assert only(effects.Fit, device.sleep_until_woken()).assignment.release == 3


def test_a_broker_that_is_there_in_time_decides_what_is_done_first() -> None:
    device = started(release=3, installed=3)
    new_data(device)
    device.up()
    assert only(effects.Fit, device.last).assignment.version == 0
    device = started(release=3, installed=3)
    device.on(Connected(session_present=False))
    new_data(device)
    assert (
        only(effects.Refresh, device.receive(serve(release=4)) + device.receive(device.echo())).release == 4
    )


def test_nothing_is_fitted_without_an_installed_release() -> None:
    device = started()
    assert none_of(effects.Fit, new_data(device)) and wake_at(device.state) == math.inf
    assert none_of(effects.Fit, device.on(events.Tick(), after_s=DAY_S))


def test_the_report_is_sent_once_the_broker_is_back_however_long_that_takes() -> None:
    device = unplugged()
    fitted(device, fit := only(effects.Fit, new_data(device)))
    device.on(events.Tick(), after_s=30 * DAY_S)
    assert waiting(device) == [fit.assignment.id]
    device.up()
    (sent,) = [effect for effect in device.done if isinstance(effect, effects.Send)][1:]
    assert sent.parcel.report.id == fit.assignment.id and sent.expiry_s > DAY_S / 2
    device.receive(Ack(fit.assignment.id, "accepted"))
    assert not waiting(device) and only(effects.Forget, device.last).id == fit.assignment.id
    assert none_of(effects.Send, device.on(events.Tick(), after_s=3600))


def test_many_fits_without_a_broker_leave_one_report() -> None:
    device = unplugged()
    ids = []
    for _ in range(20):
        fit = only(effects.Fit, new_data(device))
        ids.append(fit.assignment.id)
        fitted(device, fit)
    forgotten = [effect.id for effect in device.done if isinstance(effect, effects.Forget)]
    assert len(set(ids)) == 20 and waiting(device) == ids[-1:]
    assert forgotten == ["rel-3", *ids[:-1]]  # rel-3 was acknowledged


def test_many_failures_without_a_broker_leave_one_and_the_report_on_the_head_that_serves() -> None:
    device = unplugged()
    fitted(device, good := only(effects.Fit, new_data(device)))
    for _ in range(20):
        bad = only(effects.Fit, new_data(device))
        device.on(events.Failed(Failure.WORSE))
    assert waiting(device) == [good.assignment.id, bad.assignment.id]
    assert device.state.memory.given_up == () and device.state.memory.done == ("rel-3",)
    fitted(device, last := only(effects.Fit, new_data(device)))
    assert waiting(device) == [last.assignment.id]


def test_the_report_that_the_server_waits_for_is_not_replaced() -> None:
    device = head_device_reporting()  # not acknowledged
    device.on(Disconnected("gone"))
    device.now_s += LATE_S
    fitted(device, fit := only(effects.Fit, new_data(device)))
    assert waiting(device) == ["rel-3", fit.assignment.id]


def test_a_fit_goes_on_while_the_broker_returns_with_an_assignment() -> None:
    device = unplugged()
    fit = only(effects.Fit, new_data(device))
    device.up()
    assert none_of(effects.Refresh, device.receive(serve(version=2, release=4)))
    fitted(device, fit)
    assert only(effects.Refresh, device.last).release == 4
    assert only(effects.Send, device.last).parcel.report.id == fit.assignment.id


def test_a_download_that_waits_for_the_broker_gives_way_and_is_begun_again_with_it() -> None:
    device = unplugged()
    device.up()
    device.receive(serve(version=2, release=4))
    device.on(events.Refreshed(replace_release(4), (ONNX,)))
    assert device.state.work and device.state.work.fetching
    device.on(Disconnected("gone"))
    assert none_of(effects.Fit, new_data(device))
    found = device.sleep_until_woken()
    assert not none_of(effects.CancelFetch, found) and only(effects.Fit, found).assignment.release == 3
    fitted(device, only(effects.Fit, found))
    assert none_of(effects.Refresh, device.last)
    device.up()
    assert [e.release for e in device.done if isinstance(e, effects.Refresh)] == [3, 4, 4]


def replace_release(release: int) -> Manifest:
    return msgspec.structs.replace(MANIFEST, release=release)


def test_a_look_up_that_the_lost_connection_interrupts_is_no_failure_and_gives_way() -> None:
    device = unplugged()
    device.up()
    device.receive(serve(version=2, release=4))
    device.on(Disconnected("gone"))
    new_data(device)
    assert none_of(effects.Fit, device.on(events.Interrupted())) and not device.state.why
    assert only(effects.Fit, device.sleep_until_woken()).assignment.release == 3


def test_a_job_that_runs_ends_before_the_fit_without_a_broker() -> None:
    device = unplugged()
    device.up()
    device.receive(serve(version=2, release=4))
    device.on(events.Refreshed(replace_release(4)))  # nothing is missing: it is being installed
    device.on(Disconnected("gone"))
    assert none_of(effects.Fit, new_data(device)) and none_of(effects.Fit, device.on(events.Tick(), LATE_S))
    assert only(effects.Fit, device.on(events.Installed(4))).assignment.id == "rel-4"


def test_a_release_without_labels_is_fitted_for_its_assignment_once_there_are_some() -> None:
    device = Agent().up()
    device.receive(serve())
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.on(events.Failed(Failure.NO_DATA))
    device.on(Disconnected("gone"))
    device.now_s += LATE_S
    fit = only(effects.Fit, new_data(device))
    assert fit.assignment.id == "rel-3" and not waiting(
        device
    )  # the report on its failure was not acknowledged
    fitted(device, fit)
    assert waiting(device) == ["rel-3"] and device.state.release == 3


def test_a_pause_after_a_failure_of_a_download_does_not_delay_the_fit_without_a_broker() -> None:
    device = unplugged()
    device.up()
    device.receive(serve(version=2, release=4))
    for _ in range(6):
        device.on(events.Failed(Failure.MISSING), after_s=1000)
        device.on(events.Tick(), after_s=0)
        device.sleep_until_woken()
    device.on(events.Failed(Failure.MISSING))
    device.on(Disconnected("gone"))
    new_data(device)
    assert wake_at(device.state) == device.now_s + LIMITS.offline_s


def test_a_fit_without_a_broker_that_fails_is_tried_again_with_pauses() -> None:
    device = unplugged()
    new_data(device)
    device.on(events.Failed(Failure.OUT_OF_MEMORY))
    assert device.now_s < wake_at(device.state) < device.now_s + 3
    assert not none_of(effects.Fit, device.sleep_until_woken())


def test_a_used_up_budget_and_a_full_device_do_not_fit_without_a_broker() -> None:
    device = unplugged()
    device.on(events.BudgetChanged("budget: processor"))
    assert none_of(effects.Fit, new_data(device)) and wake_at(device.state) == math.inf
    full = Agent("full", release=3, installed=3)
    assert none_of(effects.Fit, new_data(full)) and wake_at(full.state) == math.inf


def test_reports_of_an_earlier_start_wait_too() -> None:
    parcel = Parcel("t", 5, report("refit-old-1", "head", release=3, extractor=ONNX.sha256), DAY_S)
    device = started(release=3, installed=3, outbox=restored([parcel], 1000.0))
    device.on(events.Tick(), after_s=3 * DAY_S)
    assert waiting(device) == ["refit-old-1"]
    fitted(device, fit := only(effects.Fit, new_data(device)))
    assert waiting(device) == [fit.assignment.id]
