"""`edge-fl release ...`, with a running server and without one."""

import json
import re
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, GateError, InputError, RunError
from edge_fl.wire.messages import Assignment, ServerState, decode, encode
from edge_fl.wire.transport import Packet
from edge_fl_server.cli import release
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import connected
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, registered_reports, rollouts
from edge_fl_server.release import agent_releases
from edge_fl_server.release.export import Description, Exported
from edge_fl_server.release.foreign import ForeignInput
from edge_fl_server.release.repository import Repository, now
from edge_fl_server.release.rollout import coordinator, stored_rollout
from edge_fl_server.release.rollout.commands import Request
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
from tests import agents
from tests.devices import graphs
from tests.devices.recordings import SERIES
from tests.server.conftest import WAIT_S, Bench
from tools.memory_broker import InMemoryTransport

AT_ONCE = RolloutConfig(stages=(1.0,))
STAGED = RolloutConfig(stages=(0.5, 1.0))
AT_ONCE = RolloutConfig(stages=(1.0,))


def test_without_a_server_a_roll_out_is_carried_out_from_here(releases, stage, tmp_path) -> None:
    heads = [stage.head(f"h{number}", tmp_path) for number in range(4)]
    said: list[str] = []
    record = releases.carry_out(releases.roll_out(2, STAGED), said.append, WAIT_S)
    assert (record.state, record.previous) == ("completed", 1)
    assert [head.served[-1] for head in heads] == [2] * 4
    assert [head.served.count(2) for head in heads] == [1] * 4
    assert said[0] == "no server is online: carried out from here"
    assert "completed" in said[-1]
    back = releases.carry_out(releases.roll_back(releases.way_back()), said.append, WAIT_S)
    assert (back.state, back.release, back.back) == ("completed", 1, "rolled back from release 2 to 1")
    assert {row["release"]: row["service"] for row in releases.rows()} == {1: "in service", 2: "rolled back"}
    assert stage.eventually(lambda: [head.served[-1] for head in heads] == [1] * 4)


def test_a_stale_retained_state_counts_as_offline(releases, stage, tmp_path) -> None:
    early = stage.connect("early", None, lambda event: None)
    state = ServerState(True, "dead", 7)
    early.publish(Packet(stage.topics.server("state"), encode(state), retain=True))
    early.drain(WAIT_S)
    heads = [stage.head(f"h{number}", tmp_path) for number in range(4)]
    lines: list[str] = []
    record = releases.carry_out(releases.roll_out(2, STAGED), lines.append, WAIT_S)
    assert record.state == "completed" and [head.served[-1] for head in heads] == [2] * 4
    assert lines[0] == "no server is online: carried out from here"
    early.close()


def test_a_command_uses_reports_received_by_an_earlier_one(releases, stage, tmp_path) -> None:
    heads = [stage.head(f"h{number}", tmp_path) for number in range(4)]
    record = releases.carry_out(releases.roll_out(2, STAGED), lambda line: None, WAIT_S)
    assert record.state == "completed"
    number = record.number
    reported = {report.device for report in registered_reports.of_release(releases.db, "main", 2)}
    assert reported == {head.id for head in heads}
    interrupted = rollouts.get(releases.db, number)
    rollouts.advance(releases.db, interrupted, state="paused", stage=1)
    record = releases.carry_out(releases.roll_out(None, STAGED), lambda line: None, WAIT_S)
    assert (record.number, record.reason) == (number, "4 of 4 devices succeeded")


def test_the_website_goes_back_with_the_fleet(releases, tmp_path) -> None:
    site = tmp_path / "www"

    def is_up_to_date() -> bool:
        name, payload = releases.repository.files()[-1]
        return (site / "metadata" / name).read_bytes() == payload

    def export(*options: str) -> int:
        return main(["release", "export", str(site), "--home", str(releases.home), *options])

    def carry_out(request: Request) -> str:
        return releases.carry_out(request, lambda line: None, WAIT_S).state

    assert export("--follow") == 0 and is_up_to_date()
    assert carry_out(releases.roll_out(1, AT_ONCE)) == "completed"
    assert is_up_to_date()
    releases.roll_out(2, STAGED)()
    assert carry_out(releases.steer("aborted")) == "aborted" and is_up_to_date()
    assert export("--no-follow") == 0
    assert carry_out(releases.roll_out(2, AT_ONCE, again=True)) == "completed" and not is_up_to_date()
    assert export() == 0 and is_up_to_date()


LOSS = "mean: accuracy changed by -41.0 points, in the bottom decile of 3 devices by -60.0"


def stopped_by_a_gate(db: Database, number: int, state: str, reason: str = LOSS) -> int:
    rollouts.advance(db, rollouts.get(db, number), state=state, reason=reason)
    if state == "paused":
        rollouts.steer(db, number, "paused")
    return number


@pytest.mark.parametrize(
    ("subject", "state", "consequence"),
    [
        ("extractor", "aborted", "its devices return to the release before"),
        (
            "extractor",
            "paused",
            "its devices keep it until 'edge-fl release abort'; 'edge-fl release list' shows it",
        ),
        (
            "agent",
            "paused",
            "its devices keep it until 'edge-fl release abort --agent'; 'edge-fl release agents' shows it",
        ),
    ],
)
def test_a_roll_out_that_a_gate_stops_ends_its_command_with_3(
    releases, bench: Bench, capsys, subject: str, state: str, consequence: str
) -> None:
    def begun() -> int:
        number = rollouts.begin(releases.db, "main", 2, previous=1, subject=subject)
        return stopped_by_a_gate(releases.db, number, state)

    with pytest.raises(GateError) as raised:
        release.carry_out(releases, begun, WAIT_S)
    name = "agent release 2" if subject == "agent" else "release 2"
    assert str(raised.value) == f"{name}: {state}, {LOSS}; {consequence}"
    assert raised.value.exit_code == 3
    assert capsys.readouterr().out == f"{state}\n"


def test_a_release_that_was_aborted_goes_out_again_only_if_asked(releases) -> None:
    stopped_by_a_gate(releases.db, releases.roll_out(2, STAGED)(), "aborted")
    for which in (2, None):
        with pytest.raises(InputError) as raised:
            releases.roll_out(which, STAGED)
        at = rollouts.listed(releases.db, "main")[0].changed_at[:16].replace("T", " ")
        assert str(raised.value) == (
            f"release 2: aborted by a gate on {at} UTC in stage 1 of 2: {LOSS}; expected --again to roll it out once more;"
            " nothing was requested"
        )
    assert rollouts.current(releases.db, "main") is None
    number = releases.roll_out(2, STAGED, again=True)()
    rollouts.advance(releases.db, rollouts.get(releases.db, number), state="completed")
    assert releases.roll_out(2, STAGED)() > number  # it is in service


def test_a_model_whose_release_was_aborted_is_that_release_when_it_is_published_again(releases) -> None:
    def signed(features: int) -> int:
        payload = graphs.graph(weights=graphs.WEIGHTS * features)
        manifest = graphs.manifest_for(payload, release=1)
        exported = Exported(payload, manifest.feature_dim, opset=manifest.opset, ir=manifest.ir)
        return releases.sign(
            exported, Description("pretrained", list(manifest.classes), manifest.input)
        ).release

    assert (signed(7), signed(8)) == (3, 4)
    stopped_by_a_gate(releases.db, releases.roll_out(3, STAGED)(), "aborted")
    assert signed(7) == 3
    with pytest.raises(InputError, match="release 3: aborted by a gate"):
        releases.roll_out(3, STAGED)


def test_wheels_of_an_agent_release_that_was_aborted_go_out_again_only_if_asked(releases, tmp_path) -> None:
    wheels = [str(agents.wheel(tmp_path / "wheels", "9.0.0"))]
    stopped_by_a_gate(
        releases.db,
        releases.roll_out_agent(wheels, AT_ONCE, downgrade=False)(),
        "aborted",
        "failures: 3 of 3",
    )
    agent_releases.withdraw(releases.repository, 1)
    for targets, expected in ((wheels, "--again"), (["9.0.0"], r"its wheels \(.whl\) and --again")):
        with pytest.raises(
            InputError, match=rf"aborted by a gate on .*: failures: 3 of 3; expected {expected}"
        ):
            releases.roll_out_agent(targets, AT_ONCE, downgrade=False)
    assert [row["number"] for row in releases.agent_rows()] == [1]
    releases.roll_out_agent(wheels, AT_ONCE, downgrade=False, again=True)()
    assert [(row["number"], row["state"]) for row in releases.agent_rows()] == [
        (2, "running"),
        (1, "aborted"),
    ]


@pytest.mark.parametrize(
    ("ends", "consequence"),
    [
        ("paused", "its devices keep it until 'edge-fl release abort'; 'edge-fl release list' shows it"),
        ("aborted", "its devices return to the release before"),
    ],
)
def test_a_roll_out_that_a_person_stops_is_an_error_of_its_command(
    releases, capsys, ends: str, consequence: str
) -> None:
    def stopped() -> int:
        number = releases.roll_out(2, STAGED)()
        rollouts.steer(releases.db, number, ends)
        return number

    with pytest.raises(RunError) as raised:
        release.carry_out(releases, stopped, WAIT_S)
    assert str(raised.value) == f"release 2: {ends}, by hand; {consequence}"
    assert raised.value.exit_code == 1
    assert capsys.readouterr().out == f"{ends}\n"
    if ends == "paused":
        release.carry_out(releases, releases.steer("aborted"), WAIT_S, "aborted")


def test_a_running_server_carries_out_commands(releases, bench: Bench, tmp_path) -> None:
    server = replace(bench.server, journal=Journal(releases.db))
    rollout = RolloutCoordinator(server, releases.repository)
    said: list[str] = []

    def request_and_pause() -> int:
        releases.roll_out(2, RolloutConfig(stages=(1e-9, 1.0), success=1.0))()
        return releases.steer("paused")()

    paused = releases.carry_out(request_and_pause, said.append, WAIT_S)
    assert paused.state == "paused"
    assert said[0] == "the running server carries it out"
    resumed = releases.carry_out(releases.roll_out(None, STAGED), said.append, WAIT_S)
    assert (resumed.number, resumed.state) == (paused.number, "completed")
    rollout.close()


def test_impossible_commands_are_errors(releases) -> None:
    with pytest.raises(InputError, match=r"release 7: not kept, only \[1, 2\]"):
        releases.roll_out(7, STAGED)
    with pytest.raises(InputError, match="no roll-out is under way"):
        releases.steer("aborted")
    with pytest.raises(InputError, match="no older release than 1 to go back to"):
        releases.way_back()


def test_an_abort_also_reaches_devices_that_connect_later(releases, stage, tmp_path) -> None:
    releases.roll_out(2, STAGED)()
    assert releases.carry_out(releases.steer("aborted"), lambda line: None, WAIT_S).state == "aborted"
    assert "by hand" in [row["reason"] for row in releases.rows()]
    late = stage.head("late", tmp_path)
    assert releases.carry_out(releases.roll_out(1, AT_ONCE), lambda line: None, WAIT_S).state == "completed"
    assert late.served == [1]
    assert decode(stage.retained("d/late/dn/assignment")["d/late/dn/assignment"], Assignment).release == 1


def test_the_list_shows_every_kept_release_and_how_it_stands(releases, tmp_path: Path, capsys) -> None:
    releases.db.close()
    assert main(["release", "list", "--home", str(tmp_path / "home"), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["release"], row["state"]) for row in rows] == [(2, ""), (1, "completed")]


def test_a_folder_without_releases_is_named(tmp_path: Path, capsys) -> None:
    Database.open(tmp_path / "server" / "registry.sqlite").close()
    assert main(["release", "list", "--home", str(tmp_path / "none")]) == 4
    assert "none/main: no releases of fleet 'main'" in capsys.readouterr().err
    assert main(["release", "rollout", "--stages", "0.5,0.1", "--home", str(tmp_path)]) == 4
    assert "expected growing shares" in capsys.readouterr().err


def test_without_a_broker_nothing_is_requested(releases) -> None:
    def refused(*_: object, **__: object) -> InMemoryTransport:
        raise ConnectError("broker: Connection refused")

    offline = replace(releases, connect=refused)
    with pytest.raises(ConnectError, match="Connection refused; nothing was requested"):
        release.carry_out(offline, offline.roll_out(2, STAGED), 1.0)
    assert rollouts.current(releases.db, "main") is None


def test_a_roll_out_whose_command_failed_is_paused_and_not_carried_out_by_the_next_server(
    releases, stage, tmp_path
) -> None:
    """No head-only device responds in time, so the command fails, with and without a server."""
    heads = [stage.head(f"h{number}", tmp_path, silent=True) for number in range(4)]
    with pytest.raises(DeadlineError, match="it is paused, 'edge-fl release rollout' resumes it"):
        releases.carry_out(releases.roll_out(2, STAGED), lambda line: None, 1.0)
    paused = rollouts.current(releases.db, "main")
    assert (paused.state, paused.desired, paused.stage) == ("paused", "paused", 0)
    assert stage.eventually(lambda: all(head.served for head in heads))
    served = [set(head.served) for head in heads]
    with Journal(releases.db) as journal, connected(ServerConnection(stage.connect, journal)) as server:
        rollout = RolloutCoordinator(server, releases.repository)
        assert not stage.eventually(lambda: rollouts.current(releases.db, "main") != paused, 2.0)
        rollout.close()
    assert [set(head.served) for head in heads] == served


def test_a_roll_out_says_how_many_devices_have_answered_and_for_which_it_waits_until_when(
    releases, stage, tmp_path, monkeypatch
) -> None:
    """Devices that connected and left without a word still count as online until the stage has waited for them."""
    for number in range(6):
        stage.head(f"h{number}", tmp_path, silent=number > 0)
    monkeypatch.setattr(stored_rollout, "QUIET_S", 1.0)
    lines, listed = [], []

    def report(line: str) -> None:
        lines.append(line)
        listed.append(releases.rows()[0]["reason"])  # of `release list`

    with pytest.raises(DeadlineError) as late:
        releases.carry_out(releases.roll_out(2, AT_ONCE), report, 6.0)
    last_message = r"\(last message 20\d\d-\d\d-\d\d \d\d:\d\d UTC\)"
    waits = (
        r"running, stage 1 of 1 \(100%\), 1 of 6 devices answered, waits until \d\d:\d\d UTC for"
        rf" h1 {last_message}, h2 {last_message}, h3 {last_message} and 2 more"
    )
    assert re.fullmatch(f"release 2: {waits}", lines[-1]), lines
    assert re.match(f"release 2: after 6 s {waits}; it is paused", str(late.value))
    assert listed[-1] in lines[-1] and listed[-1].startswith("1 of 6 devices answered")


def test_a_roll_out_is_paused_if_the_server_that_should_carry_it_out_has_left(releases, bench: Bench) -> None:
    def leave(line: str) -> None:
        bench.connection.close()

    with pytest.raises(DeadlineError, match="it is paused"):
        releases.carry_out(releases.roll_out(2, STAGED), leave, 0.5)
    assert rollouts.current(releases.db, "main").state == "paused"


def test_a_roll_out_continues_if_only_its_command_ran_out_of_time(releases, bench: Bench) -> None:
    with pytest.raises(DeadlineError, match="the running server continues it"):
        releases.carry_out(releases.roll_out(2, STAGED), lambda line: None, 0.5)
    assert rollouts.current(releases.db, "main").state == "running"


def test_a_roll_out_that_another_one_replaced_is_not_continued_after_it(releases, stage, tmp_path) -> None:
    heads = [stage.head(f"h{number}", tmp_path) for number in range(3)]
    replaced = releases.roll_out(2, STAGED)()
    assert (
        releases.carry_out(releases.roll_back(releases.way_back(1)), lambda line: None, WAIT_S).state
        == "rolled_back"
    )
    replaced = releases.roll_out(2, STAGED, again=True)()
    assert releases.carry_out(releases.roll_out(1, AT_ONCE), lambda line: None, WAIT_S).state == "completed"
    assert rollouts.get(releases.db, replaced).reason == "replaced by release 1"
    assert rollouts.current(releases.db, "main") is None
    assert [head.served[-1] for head in heads] == [1] * 3


@pytest.mark.parametrize("slept", [False, True])
def test_metadata_near_their_expiry_are_signed_again_while_a_server_is_online(
    releases, bench: Bench, monkeypatch, slept: bool
) -> None:
    ahead = [0]
    if slept:  # its computer: the clock is days ahead, the time since the start is not
        monkeypatch.setattr(
            coordinator, "_times", lambda: (time.monotonic(), time.time() + 86_400 * ahead[0])
        )
    else:
        monkeypatch.setattr(coordinator, "REFRESH_S", 0.1)
    repository = Repository(releases.repository.folder, clock=lambda: now() + timedelta(days=ahead[0]))
    rollout = RolloutCoordinator(replace(bench.server, journal=Journal(releases.db)), repository)
    before = bench.retained("tuf/timestamp.json")
    assert before and not bench.eventually(lambda: bench.retained("tuf/timestamp.json") != before, 1.0)
    ahead[0] = 5
    assert bench.eventually(lambda: bench.retained("tuf/timestamp.json") != before)
    rollout.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected either a file, such as model.onnx, or --model NAME"),
        (["model.onnx", "--model", "cnn-tiny"], "expected either a file"),
        (["model.onnx"], "--classes: 0 classes, expected 2 to 1024"),
        (["model.onnx", "--classes", "cat"], "--classes: 1 class (cat), expected 2 to 1024"),
        (["model.onnx", "--classes", "cat,dog"], "model.onnx: does not exist"),
        (["model.onnx", "--classes", "cat,dog", "--mean", "a"], "--mean a: expected numbers"),
        (["--model", "cnn-tiny", "--classes", "cat,dog", "--mean", "0.5"], "--reference describe a file"),
        (["model.onnx", "--classes", "cat,dog", "--input", "demo"], "--input demo: has no [input]"),
        (["model.onnx", "--classes", "cat,dog", "--input", "absent.toml"], "absent.toml"),
    ],
)
def test_what_to_publish_is_checked_before_anything_else(arguments, said, capsys):
    assert main(["release", "publish", *arguments]) == 4
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_network_for_a_series_is_made_by_name_and_input() -> None:
    made, description = release.made_by_model("cnn1d", "", ["lying", "standing"], ForeignInput(input=SERIES))
    assert (description.input, made.feature_dim) == (SERIES, 64)


def test_a_rollout_takes_settings_by_the_keys_of_a_recipe() -> None:
    given = ["release.rollout.gates.false_abort=0.1", "release.rollout.success=0.8"]
    plan = release.rollout_plan("0.5,1", given, stage_wait_s=5.0)
    assert (plan.stages, plan.success, plan.stage_wait_s) == ((0.5, 1.0), 0.8, 5.0)
    assert plan.gates.false_abort == 0.1
    for wrong, named in (("rounds=3", "--set rounds=3: expected only"), ("release.rollout.stage=1", "stage")):
        with pytest.raises(ConfigError, match=named):
            release.rollout_plan("", [wrong])
