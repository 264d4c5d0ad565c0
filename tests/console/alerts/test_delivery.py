"""Alerts reach a mail server and a webhook exactly once, also after a restart of the server, and are resolved."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConfigError
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Packet
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_console.alerts import stored, watcher
from edge_fl_console.alerts.rules import AlertSettings, Rule, RulePlace
from edge_fl_console.alerts.watcher import Channel, Evaluator, Sender
from edge_fl_server.children import CommandProcesses
from edge_fl_server.registry import Database, registered_devices, rollouts
from edge_fl_server.registry.tables import DeviceRecord
from tests.console.alerts.conftest import HookSink, MailSink

RULES = {"quarantine": Rule("quarantine")}
AT_ONCE = AlertSettings(rules=RULES, group_s=0, settle_s=0)
RAISED = ("Fleet main: 1 alert", "quarantine: pi-07: flooding")
RESOLVED = ("Fleet main: 1 resolved", "quarantine resolved: pi-07: flooding")


def eventually(claim: Callable[[], object], deadline_s: float = 60.0) -> bool:
    until = time.monotonic() + deadline_s
    while not (found := claim()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(found)


def stripped(received: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(title, body.strip()) for title, body in received]


@pytest.fixture
def place(tmp_path: Path) -> RulePlace:
    db = Database.open(tmp_path / "server" / "registry.sqlite")
    registered_devices.record(db, [DeviceRecord("main", f"pi-{number:02}", "ready") for number in range(30)])
    return RulePlace(db, "main")


def configure(tmp_path: Path, *urls: str) -> Path:
    path = tmp_path / "home" / "main" / "alerts.toml"
    path.parent.mkdir(parents=True)
    channels = "".join(f"channel-{number} = '{url}'\n" for number, url in enumerate(urls))
    path.write_text(f"group_s = 0\nsettle_s = 0\n[channels]\n{channels}")
    return tmp_path / "home"


def test_an_alert_reaches_mail_and_webhook_once_also_after_a_restart(
    place: RulePlace, mail: tuple[MailSink, str], hook: tuple[HookSink, str], tmp_path: Path
) -> None:
    home, registry = configure(tmp_path, mail[1], hook[1]), str(tmp_path / "server" / "registry.sqlite")
    sinks = (mail[0].received, hook[0].received)
    with watcher.watching(registry, "main", home, poll_s=0.05):
        registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
        assert eventually(lambda: all(sinks))
    with watcher.watching(registry, "main", home, poll_s=0.05):
        registered_devices.readmit(place.db, "main", "pi-07")
        assert eventually(lambda: all(len(received) > 1 for received in sinks))
    assert [stripped(received) for received in sinks] == [[RAISED, RESOLVED]] * 2


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_server_sends_no_alert_again(
    place: RulePlace,
    mail: tuple[MailSink, str],
    hook: tuple[HookSink, str],
    own_mosquitto: Mosquitto,
    tmp_path: Path,
) -> None:
    home = configure(tmp_path, mail[1], hook[1])
    sinks, lines = (mail[0].received, hook[0].received), []
    options = ["--port", str(own_mosquitto.endpoint.port), "--home", str(home)]
    options += ["--database", str(tmp_path / "server" / "registry.sqlite")]
    with CommandProcesses(lambda name, line: lines.append(line), {"OMP_NUM_THREADS": "1"}) as children:
        registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
        first = children.start("first", "server", "up", *options)
        # Sent and stored: a claim that was not stored as sent is sent again, and its resolution is not.
        assert eventually(
            lambda: [len(sent) for sent in stored.delivered(place.db, "main").values()] == [2], 120
        ), lines
        os.kill(first.pid, signal.SIGKILL)
        registered_devices.readmit(place.db, "main", "pi-07")
        children.start("second", "server", "up", *options)
        assert eventually(lambda: all(len(received) > 1 for received in sinks), 120), lines
    assert [stripped(received) for received in sinks] == [[RAISED, RESOLVED]] * 2


def test_every_stop_of_a_roll_out_is_sent_with_its_own_numbers(
    place: RulePlace, hook: tuple[HookSink, str]
) -> None:
    """Two aborts of one release, and an agent's roll-out that pauses twice, all within a minute."""
    settings = AlertSettings(rules={"rollout": Rule("rollout")}, group_s=0)
    evaluator, sender = Evaluator(place, settings), Sender(place, settings, Channel.open("hook", hook[1]))

    def stopped(number: int, state: str, reason: str) -> None:
        record = rollouts.get(place.db, number)
        assert record and rollouts.advance(place.db, record, state=state, reason=reason)
        evaluator.look()
        sender.send()

    for lost in (41, 12):
        stopped(rollouts.begin(place.db, "main", 7), "aborted", f"mean: -{lost} points")
    agent = rollouts.begin(place.db, "main", 2, subject="agent")
    for succeeded in (1, 2):
        stopped(agent, "paused", f"stage 1: {succeeded} of 4 devices succeeded")
    sent = [line for _, body in hook[0].received for line in body.strip().splitlines()]
    assert [line for line in sent if "resolved" not in line] == [
        "rollout: release 7, roll-out 1: roll-out aborted: mean: -41 points",
        "rollout: release 7, roll-out 2: roll-out aborted: mean: -12 points",
        "rollout: agent release 2, roll-out 3: roll-out paused: stage 1: 1 of 4 devices succeeded",
        "rollout: agent release 2, roll-out 3: roll-out paused: stage 1: 2 of 4 devices succeeded",
    ]


def test_two_aborts_in_one_message_have_a_line_each(place: RulePlace, hook: tuple[HookSink, str]) -> None:
    settings = AlertSettings(rules={"rollout": Rule("rollout")}, group_s=0)
    for lost in (41, 12):
        record = rollouts.get(place.db, rollouts.begin(place.db, "main", 7))
        assert record and rollouts.advance(place.db, record, state="aborted", reason=f"mean: -{lost} points")
    Evaluator(place, settings).look()
    Sender(place, settings, Channel.open("hook", hook[1])).send()
    ((title, body),) = hook[0].received
    assert title == "Fleet main: 2 alerts" and "-41 points" in body and "-12 points" in body


def test_an_unavailable_channel_is_named_delays_no_other_and_gets_the_alert_later(
    place: RulePlace, hook: tuple[HookSink, str], capsys: pytest.CaptureFixture[str]
) -> None:
    back = HookSink()
    down = Channel.open("chat", f"json://user:secret@127.0.0.1:{back.port}/alerts")
    registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
    Evaluator(place, AT_ONCE).look()
    Sender(place, AT_ONCE, down).send()
    error = capsys.readouterr().err
    assert error.startswith("alert channel 'chat': ") and "; 1 alert to send, trying again" in error
    assert error.count("\n") == 1 and "secret" not in error
    Sender(place, AT_ONCE, Channel.open("hook", hook[1])).send()
    assert hook[0].received == [RAISED]
    with back:
        back.listen()
        Sender(place, AT_ONCE, down).send()
        assert back.received == [RAISED]
        back.shutdown()


@pytest.mark.broker
def test_an_alert_is_published_over_mqtt(place: RulePlace, own_mosquitto: Mosquitto) -> None:
    received: list[bytes] = []

    def on_event(event: object) -> None:
        if isinstance(event, Packet):
            received.append(event.payload)

    transport = MqttTransport(own_mosquitto.endpoint, "watcher", None, on_event)
    transport.subscribe("alerts/main")
    transport.drain(60)
    registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
    Evaluator(place, AT_ONCE).look()
    url = f"mqtt://127.0.0.1:{own_mosquitto.endpoint.port}/alerts/main"
    Sender(place, AT_ONCE, Channel.open("mqtt", url)).send()
    assert eventually(lambda: received)
    transport.close()
    assert received[0].decode().splitlines() == list(RAISED)


def test_alerts_of_many_devices_are_one_line_of_one_message(
    place: RulePlace, hook: tuple[HookSink, str]
) -> None:
    for number in range(25):
        registered_devices.quarantine(place.db, "main", f"pi-{number:02}", "flooding")
    evaluator, sender = Evaluator(place, AT_ONCE), Sender(place, AT_ONCE, Channel.open("hook", hook[1]))
    evaluator.look()
    sender.send()
    evaluator.look()
    sender.send()
    ((title, body),) = hook[0].received
    assert title == "Fleet main: 25 alerts"
    assert body.startswith("quarantine: 25: pi-00, pi-01, ") and body.endswith(
        "pi-19 and 5 more (pi-00: flooding)"
    )


def test_a_silenced_alert_is_sent_when_the_silence_ends_if_it_still_holds(
    place: RulePlace, hook: tuple[HookSink, str]
) -> None:
    evaluator, sender = Evaluator(place, AT_ONCE), Sender(place, AT_ONCE, Channel.open("hook", hook[1]))
    for name in ("pi-07", "pi-08"):
        registered_devices.quarantine(place.db, "main", name, "flooding")
        stored.silence(place.db, "main", name, place.now_s() + 3600)
    evaluator.look()
    sender.send()
    registered_devices.readmit(place.db, "main", "pi-08")
    evaluator.look()
    sender.send()
    assert hook[0].received == []
    for name in ("pi-07", "pi-08"):
        stored.silence(place.db, "main", name, 0)
    sender.send()
    assert hook[0].received == [RAISED]


def test_an_alert_is_resolved_only_when_its_condition_has_not_held_for_a_while(place: RulePlace) -> None:
    evaluator = Evaluator(place, AlertSettings(rules=RULES, settle_s=3600))
    registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
    evaluator.look()
    registered_devices.readmit(place.db, "main", "pi-07")
    evaluator.look()
    registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
    evaluator.look()
    assert [alert.subject for alert in stored.active(place.db, "main")] == ["pi-07"]
    assert len(stored.listed(place.db, "main", 0)) == 1


def test_several_servers_claim_an_alert_once_and_take_over_from_one_that_was_killed(
    database_url: str,
) -> None:
    place = RulePlace(Database.open(database_url), "main")
    registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
    Evaluator(place, AT_ONCE).look()
    claimed: list[stored.Due] = []
    now_s = place.now_s()

    def claim(at_s: int) -> None:
        claimed.extend(stored.claim(place.db, "main", "hook", {"quarantine"}, before_s=at_s, now_s=at_s))

    threads = [threading.Thread(target=claim, args=(now_s,), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(claimed) == 1
    claim(now_s + stored.CLAIM_S + 1)
    assert len(claimed) == 2
    stored.settle(place.db, "hook", claimed[-1:], sent=True)
    claim(now_s + 10 * stored.CLAIM_S)
    assert len(claimed) == 2
    registered_devices.readmit(place.db, "main", "pi-07")
    Evaluator(place, AT_ONCE).look()
    claim(now_s + 10 * stored.CLAIM_S)
    assert [due.event for due in claimed] == ["raised", "raised", "resolved"]
    stored.forget(place.db, "main", now_s + 2 * stored.KEPT_S)
    assert stored.listed(place.db, "main", 0) == []
    place.db.close()


def test_a_url_of_no_service_is_an_error_without_the_url() -> None:
    with pytest.raises(ConfigError, match="channel 'ops': its URL names no service") as error:
        Channel.open("ops", "nowhere://user:secret@host")
    assert "secret" not in str(error.value)


def test_alerts_are_listed_silenced_and_channels_tested_by_command(
    place: RulePlace, hook: tuple[HookSink, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = HookSink()
    home = configure(tmp_path, hook[1], f"json://127.0.0.1:{refusing.port}")

    def run(*arguments: str) -> int:
        registry = str(tmp_path / "server" / "registry.sqlite")
        return main(["fleet", "alerts", *arguments, "--home", str(home), "--database", registry])

    registered_devices.quarantine(place.db, "main", "pi-07", "flooding")
    Evaluator(place, AT_ONCE).look()
    assert run("silence", "pi-07", "--for", "2h") == 0
    assert run("list") == 0
    assert "silent until" in capsys.readouterr().out
    assert run("silence", "pi-07", "--for", "0min") == 0
    assert run("silence", "pi-99") == 4
    assert "no rule and no device of fleet 'main'" in capsys.readouterr().err
    assert run("silence", "drift", "--for", "soon") == 4
    assert run("test", "channel-0") == 0
    assert capsys.readouterr().out == "channel-0\n" and hook[0].received[0][0] == "Fleet main: test"
    assert run("test") == 2
    assert "channel-1: the test message was not accepted" in capsys.readouterr().err
    assert run("test", "chanel-1") == 4
    assert "(did you mean 'channel-1'?)" in capsys.readouterr().err
    refusing.server_close()
