"""How a run ends: too few devices, a missed quorum, a stop on request, Ctrl-C; and how it is resumed."""

import _thread
import signal
import threading
from dataclasses import replace as changed

import pytest

from edge_fl.errors import ConfigError, DeadlineError, RunError, StoppedError
from edge_fl.learn.tree import same
from edge_fl.wire.messages import ServerState, decode
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.registry import Database, runs
from edge_fl_server.runs import checkpoint
from edge_fl_server.runs.results import Results
from tests.server.orchestrate.toy_runs import finished, method, the_run, with_recipe


def test_too_few_devices_end_the_run_with_who_is_there(stage, run_request):
    stage.device("d1")
    run_request = with_recipe(run_request, cohort=CohortConfig(min_devices=2, wait_s=0.3))
    with pytest.raises(
        DeadlineError, match=r"1 full and 0 head-only devices after 0.3 s, expected 2"
    ) as late:
        finished(run_request)
    assert late.value.exit_code == 3
    assert the_run(run_request).state().state == "failed"
    assert "expected 2" in the_run(run_request).state().reason


def test_a_run_that_somebody_asks_to_end_is_stopped(stage, run_request):
    """Through the registry, from another process, while it goes on."""
    stage.device("d1", delay_s=0.3), stage.device("d2")
    run_request = with_recipe(run_request, rounds=500)

    def ask():
        db = Database.open(run_request.registry)
        assert stage.eventually(lambda: any(runs.rounds_of(db, run.run) for run in runs.listed(db)))
        assert runs.stop(db, runs.listed(db)[0].run)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(StoppedError, match="stopped on request"):
        finished(run_request)
    asking.join()
    assert the_run(run_request).state().state == "stopped"
    assert [run.state for run in runs.listed(Database.open(run_request.registry))] == ["stopped"]


def test_a_missed_quorum_ends_the_run_as_failed(stage, run_request):
    stage.device("d1"), stage.device("d2", tamper=lambda *_: [])
    run_request = with_recipe(run_request, cohort=CohortConfig(min_devices=2, quorum=1.0, deadline_s=0.5))
    with pytest.raises(RunError, match="1 of 2 clients responded"):
        finished(run_request)
    assert the_run(run_request).state().state == "failed"
    assert not [topic for topic in stage.retained() if topic.startswith(("art/", "round/"))]


@pytest.fixture
def ctrl_c():
    """Ctrl-C works as on a terminal, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_in_round_2(mode, report, payload):
    if mode == "train" and "-2-" in report.id:
        _thread.interrupt_main()
        return []
    return [(report, payload)]


def test_ctrl_c_ends_the_run_as_stopped_and_leaves_nothing_behind(stage, run_request, ctrl_c):
    stage.device("d1"), stage.device("d2", tamper=interrupt_in_round_2)
    with pytest.raises(KeyboardInterrupt):
        finished(run_request)
    results = the_run(run_request)
    assert results.state().state == "stopped"
    assert [record.round for record in results.rounds()] == [1]
    assert checkpoint.load(results.checkpoints).round == 1
    kept = stage.retained()
    assert not decode(kept["srv/state"], ServerState).online
    assert not [
        topic for topic in kept if topic.startswith(("art/", "round/")) or topic.endswith("dn/assignment")
    ]


def test_a_run_that_was_stopped_and_resumed_equals_an_undisturbed_one(stage, run_request, ctrl_c):
    run_request = with_recipe(run_request, method=method("fedrep"), rounds=3)
    stage.device("d1"), stage.device("d2")
    whole = finished(run_request)
    interrupted = stage.devices[1]
    interrupted.tamper = interrupt_in_round_2
    for device in stage.devices:
        device._own.clear()
    with pytest.raises(KeyboardInterrupt):
        finished(run_request)
    interrupted.tamper = lambda mode, report, payload: [(report, payload)]
    (stopped,) = [path for path in run_request.runs.iterdir() if path != whole]
    # What d1 trained in the round that nobody closed is forgotten by a real device's store too: it keeps personal parts by round.
    for device in stage.devices:
        device._own["own"] = device._own["after 1"]
    assert finished(changed(run_request, resume=stopped)) == stopped
    ours, theirs = (checkpoint.load(path / "checkpoints") for path in (stopped, whole))
    assert same(ours.shared, theirs.shared)
    assert Results.open(stopped).state().state == "completed"
    assert Results.open(stopped).summary() == Results.open(whole).summary()


def test_a_simulated_run_that_lost_its_last_round_ends_the_same_after_resuming(run_request):
    run_request = with_recipe(run_request, source="simulated", method=method("fedrep"), rounds=3)
    path = finished(run_request)
    last = path / "checkpoints" / "round-00003.safetensors"
    tensors, summary = last.read_bytes(), Results.open(path).summary()
    last.unlink()
    finished(changed(run_request, resume=path))
    assert last.read_bytes() == tensors
    assert Results.open(path).summary() == summary
    with pytest.raises(ConfigError, match="completed, with all its 3 rounds; expected an interrupted run"):
        finished(changed(run_request, resume=path))
    assert Results.open(path).summary() == summary
