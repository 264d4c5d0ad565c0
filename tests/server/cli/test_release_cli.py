"""`edge-fl release ...`, with a running server and without one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.config import RolloutConfig
from edge_fl.errors import ConnectError, InputError
from edge_fl.wire.messages import Assignment, ServerState, decode, encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from server.cli import release
from server.mqtt.journal import Journal
from server.registry import Database, reports, rollouts
from server.release.publish import Publisher
from server.release.repository import Repository
from server.release.rollout.commands import ReleaseCommands
from server.release.rollout.coordinator import RolloutCoordinator
from tests.devices import graphs
from tests.memory_broker import InMemoryTransport
from tests.server.conftest import Bench

AT_ONCE = RolloutConfig(stages=(1.0,))
STAGED = RolloutConfig(stages=(0.5, 1.0))


@pytest.fixture
def releases(broker, tmp_path) -> ReleaseCommands:
    """Two releases are kept, and the first one is served."""
    repository = Repository(tmp_path / "home" / "main")
    transport = InMemoryTransport(broker, "publisher", None, lambda event: None)
    publisher = Publisher(transport, Topics("main"), repository)
    for number in (1, 2):
        payload = graphs.graph(weights=graphs.WEIGHTS * number)
        manifest = graphs.manifest_for(payload, release=number)
        publisher.publish(manifest, {manifest.extractor.sha256: payload})
    transport.close()
    db = Database.open(tmp_path / "server" / "registry.sqlite")
    number = rollouts.begin(db, "main", 1)
    rollouts.advance(db, rollouts.get(db, number), state="completed")
    return ReleaseCommands(partial(InMemoryTransport, broker), "main", tmp_path / "home", db)


def test_without_a_server_a_roll_out_is_carried_out_from_here(releases, stage, tmp_path) -> None:
    heads = [stage.head(f"h{number}", tmp_path) for number in range(4)]
    said: list[str] = []
    record = releases.carry_out(releases.roll_out(2, STAGED), said.append, 30)
    assert (record.state, record.previous) == ("completed", 1)
    assert [head.served[-1] for head in heads] == [2] * 4
    assert [head.served.count(2) for head in heads] == [1] * 4
    assert said[0] == "no server is online: carried out from here"
    assert "completed" in said[-1]
    back = releases.carry_out(releases.roll_back(None), said.append, 30)
    assert (back.state, back.release) == ("completed", 1)
    assert stage.eventually(lambda: [head.served[-1] for head in heads] == [1] * 4)


def test_a_stale_retained_state_counts_as_offline(releases, stage, tmp_path) -> None:
    early = stage.connect("early", None, lambda event: None)
    state = ServerState(True, "dead", 7)
    early.publish(Packet(stage.topics.server_state(), encode(state), retain=True))
    early.drain(5)
    heads = [stage.head(f"h{number}", tmp_path) for number in range(4)]
    lines: list[str] = []
    record = releases.carry_out(releases.roll_out(2, STAGED), lines.append, 30)
    assert record.state == "completed" and [head.served[-1] for head in heads] == [2] * 4
    assert lines[0] == "no server is online: carried out from here"
    early.close()


def test_a_command_uses_reports_received_by_an_earlier_one(releases, stage, tmp_path) -> None:
    heads = [stage.head(f"h{number}", tmp_path) for number in range(4)]
    number = releases.roll_out(2, STAGED)
    assert releases.carry_out(number, lambda line: None, 30).state == "completed"
    reported = {report.device for report in reports.of_release(releases.db, "main", 2)}
    assert reported == {head.id for head in heads}
    interrupted = rollouts.get(releases.db, number)
    rollouts.advance(releases.db, interrupted, state="paused", stage=1)
    assert releases.roll_out(None, STAGED) == number
    begun_s = time.monotonic()
    assert releases.carry_out(number, lambda line: None, 30).reason == "4 of 4 devices succeeded"
    assert time.monotonic() - begun_s < 15, "waited for devices that had responded"


def test_the_website_goes_back_with_the_fleet(releases, tmp_path) -> None:
    site = tmp_path / "www"

    def is_up_to_date() -> bool:
        name, payload = releases.repository.files()[-1]
        return (site / "metadata" / name).read_bytes() == payload

    def export(*options: str) -> int:
        return main(["release", "export", str(site), "--home", str(releases.home), *options])

    def carry_out(number: int) -> str:
        return releases.carry_out(number, lambda line: None, 30).state

    assert export("--keep") == 0 and is_up_to_date()
    assert carry_out(releases.roll_out(1, AT_ONCE)) == "completed"
    assert is_up_to_date()
    number = releases.roll_out(2, STAGED)
    releases.steer("aborted")
    assert carry_out(number) == "aborted" and is_up_to_date()
    assert export("--no-keep") == 0
    assert carry_out(releases.roll_out(2, AT_ONCE)) == "completed" and not is_up_to_date()
    assert export() == 0 and is_up_to_date()


def test_a_running_server_carries_out_commands(releases, bench: Bench, tmp_path) -> None:
    server = replace(bench.server, journal=Journal(releases.db))
    rollout = RolloutCoordinator(server, releases.repository)
    said: list[str] = []
    number = releases.roll_out(2, RolloutConfig(stages=(1e-9, 1.0), success=1.0))
    releases.steer("paused")
    assert releases.carry_out(number, said.append, 20).state == "paused"
    assert said[0] == "the running server carries it out"
    assert releases.roll_out(None, STAGED) == number
    assert releases.carry_out(number, said.append, 20).state == "completed"
    rollout.close()


def test_impossible_commands_are_errors(releases) -> None:
    with pytest.raises(InputError, match=r"release 7: not kept, only \[1, 2\]"):
        releases.roll_out(7, STAGED)
    with pytest.raises(InputError, match="no roll-out is under way"):
        releases.steer("aborted")
    with pytest.raises(InputError, match="no release to go back to"):
        releases.roll_back(None)


def test_an_abort_also_reaches_devices_that_connect_later(releases, stage, tmp_path) -> None:
    number = releases.roll_out(2, STAGED)
    releases.steer("aborted")
    assert releases.carry_out(number, lambda line: None, 20).state == "aborted"
    assert releases.rows()[0].reason == "by hand" or releases.rows()[1].reason == "by hand"
    late = stage.head("late", tmp_path)
    assert releases.carry_out(releases.roll_out(1, AT_ONCE), lambda line: None, 20).state == "completed"
    assert late.served == [1]
    assert decode(stage.retained("d/late/dn/assignment")["d/late/dn/assignment"], Assignment).release == 1


def test_the_list_shows_every_kept_release_and_how_it_stands(releases, tmp_path: Path, capsys) -> None:
    releases.db.close()
    assert main(["release", "list", "--home", str(tmp_path / "home"), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["release"], row["state"]) for row in rows] == [(2, ""), (1, "completed")]


def test_a_folder_without_releases_is_named(tmp_path: Path, capsys) -> None:
    assert main(["release", "list", "--home", str(tmp_path / "none")]) == 4
    assert "no releases in it" in capsys.readouterr().err
    assert main(["release", "rollout", "--stages", "0.5,0.1", "--home", str(tmp_path)]) == 4
    assert "expected growing shares" in capsys.readouterr().err


def test_without_a_broker_the_error_says_that_the_roll_out_stays_requested(releases) -> None:
    def refused(*_: object, **__: object) -> InMemoryTransport:
        raise ConnectError("broker: Connection refused")

    number = releases.roll_out(2, STAGED)
    with pytest.raises(ConnectError, match="Connection refused; the roll-out stays requested"):
        release._carry_out(replace(releases, connect=refused), number, 1.0)
    assert rollouts.current(releases.db, "main").number == number
