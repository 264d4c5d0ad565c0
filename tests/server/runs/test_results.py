"""A results folder is complete, readable while the run goes on, and honest about how the run ended."""

import csv
import json
import math
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from edge_fl import metrics
from edge_fl.errors import InputError, RunError
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs.results import Results, commit, list_runs, provenance, run_id
from edge_fl_server.runs.round_metrics import RoundMetrics

RECIPE = Recipe(name="fedrep-digits", seed=7, source="fleet")


def test_a_new_folder_says_what_runs_on_what(tmp_path: Path) -> None:
    with Results.create(tmp_path, RECIPE, data_hash="ab") as results:
        assert results.recipe() == RECIPE
        manifest = json.loads((results.path / "manifest.json").read_bytes())
        assert (manifest["run"], manifest["seed"], manifest["source"], manifest["data_hash"]) == (
            results.id,
            7,
            "fleet",
            "ab",
        )
        assert {"torch", "onnx", "onnxruntime", "numpy"} <= manifest["provenance"]["libraries"].keys()
        assert manifest["provenance"]["python"] == ".".join(map(str, sys.version_info[:3]))
        assert all(folder.is_dir() for folder in (results.checkpoints, results.artefacts))
        assert results.manifest().run == results.path.name


@pytest.mark.parametrize(
    "name", ["run", "a.very.long-name-indeed-for-a-recipe", "0..", "x--y", "fedavg-ft-cifar10"]
)
def test_a_run_id_fits_into_a_topic(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]{1,32}", run_id(name, datetime.now(UTC)))
    assert run_id(name, datetime.now(UTC)) != run_id(name, datetime.now(UTC))


def test_rounds_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    results = Results.create(tmp_path, RECIPE)
    results.append_round(RoundMetrics(round=1, clients={"c1": {"loss": 0.5}}))
    results.append_round(RoundMetrics(round=2, clients={"c1": {"loss": math.nan}}))
    first, second = Results.open(results.path).rounds()
    assert (first.round, first.line, first.clients) == (1, 1, {"c1": {"loss": 0.5}})
    assert (second.round, second.line) == (2, 2) and math.isnan(second.clients["c1"]["loss"])
    written = [json.loads(line) for line in (results.path / "round_metrics.jsonl").read_text().splitlines()]
    assert written[1]["clients"] == {"c1": {"loss": None}}
    assert all(line.keys() == set(RoundMetrics.__struct_fields__) for line in written)
    results.close()


def test_a_line_cut_short_is_skipped_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    results = Results.create(tmp_path, RECIPE)
    results.append_round(RoundMetrics(round=1))
    results.close()
    with (results.path / "round_metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 2, "lo')
    with Results.resume(results.path) as again:
        again.append_round(RoundMetrics(round=2))
    assert [line.round for line in Results.open(results.path).rounds()] == [1, 2]


def test_resuming_after_a_round_drops_those_that_come_again(tmp_path: Path) -> None:
    results = Results.create(tmp_path, RECIPE)
    for number in (1, 2, 3):
        results.append_round(RoundMetrics(round=number))
    results.close()
    with Results.resume(results.path, after=1) as again:
        assert [line.round for line in again.rounds()] == [1]
        again.append_round(RoundMetrics(round=2))
    assert [line.round for line in Results.open(results.path).rounds()] == [1, 2]


def test_the_summary_has_honest_names_as_keys(tmp_path: Path) -> None:
    with Results.create(tmp_path, RECIPE) as results:
        assert results.summary() == {}
        summaries = {
            metrics.PERSONAL_AFTER: metrics.summarise([0.5, 1.0]),
            metrics.GLOBAL_TEST: metrics.summarise([]),
        }
        results.write_summary("fleet", summaries)
        found = json.loads((results.path / "metrics_summary.json").read_bytes())
        assert found["source"] == "fleet"
        assert found["personal.test_acc.after"]["mean"] == 0.75
        assert set(found["personal.test_acc.after"]) == {
            "mean",
            "weighted_mean",
            "std",
            "bottom_decile",
            "clients",
        }
        assert found["global.test_acc"]["mean"] is None
        assert results.summary()[metrics.PERSONAL_AFTER] == summaries[metrics.PERSONAL_AFTER]
        assert math.isnan(results.summary()[metrics.GLOBAL_TEST].mean)
        (results.path / "metrics_summary.json").write_text('{"global.test_acc": {"mean": 1}}')
        with pytest.raises(InputError, match=r"metrics_summary\.json: cannot be read"):
            results.summary()


def test_devices_become_lines_of_a_table(tmp_path: Path) -> None:
    with Results.create(tmp_path, RECIPE) as results:
        results.write_devices(
            [{"device": "d1", "tier": "head"}, {"device": "d2", "tier": "full", "why": 'a "quoted", word'}]
        )
        with (results.path / "devices.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    assert rows == [
        {"device": "d1", "tier": "head", "why": ""},
        {"device": "d2", "tier": "full", "why": 'a "quoted", word'},
    ]


def test_a_run_ends_as_its_block_ends(tmp_path: Path) -> None:
    with Results.create(tmp_path, RECIPE) as completed:
        assert Results.open(completed.path).state().state == "running"
    with pytest.raises(RunError), Results.create(tmp_path, RECIPE) as failed:
        raise RunError("loss is NaN in round 3")
    with pytest.raises(KeyboardInterrupt), Results.create(tmp_path, RECIPE) as stopped:
        raise KeyboardInterrupt
    with Results.create(tmp_path, RECIPE) as said:
        said.finish("stopped", "asked to")
    states = [Results.open(results.path).state() for results in (completed, failed, stopped, said)]
    assert [(state.state, state.reason) for state in states] == [
        ("completed", ""),
        ("failed", "loss is NaN in round 3"),
        ("stopped", "stopped by Ctrl-C"),
        ("stopped", "asked to"),
    ]


def test_a_run_whose_process_died_is_not_shown_as_running(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from edge_fl_server.recipes.recipe import Recipe;"
        "from edge_fl_server.runs.results import Results;"
        "Results.create(Path(sys.argv[1]), Recipe()); os._exit(9)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False).returncode == 9
    )
    (run,) = list_runs(tmp_path)
    assert (run.state, run.reason) == ("stopped", "its process ended unexpectedly")


def test_two_processes_never_write_to_one_run(tmp_path: Path) -> None:
    with (
        Results.create(tmp_path, RECIPE) as results,
        pytest.raises(InputError, match="another process writes"),
    ):
        Results.resume(results.path)
    with pytest.raises(RunError, match="opened to read"):
        Results.open(results.path).append_round(RoundMetrics(round=1))


def test_runs_are_listed_newest_first_and_other_folders_are_passed_over(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere") == []
    first, second = (Results.create(tmp_path, RECIPE) for _ in range(2))
    first.finish("completed")
    manifest = msgspec.structs.replace(second.manifest(), created="2999-01-01T00:00:00+00:00")
    (second.path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (tmp_path / "notes").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    runs = list_runs(tmp_path)
    assert [(run.run, run.state) for run in runs] == [(second.id, "running"), (first.id, "completed")]
    assert (runs[0].method, runs[0].dataset, runs[0].source) == ("fedavg", "digits", "fleet")
    second.close()


def test_a_run_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    with (
        Results.create(tmp_path, RECIPE) as results,
        pytest.raises(InputError, match=f"not a run's folder .did you mean '{results.id}'"),
    ):
        Results.open(tmp_path / results.id[:-1])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be created"):
        Results.create(tmp_path / "file", RECIPE)


def test_the_commit_is_this_codes_and_not_that_of_a_checkout_around_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, timeout=60)

    def record() -> None:
        git("add", ".")
        git("-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-m", "somebody's work")

    git("init")
    (tmp_path / "thesis.tex").write_text("")
    record()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    assert commit(tmp_path / "package") is None
    record()
    found = commit(tmp_path / "package")
    assert found is not None
    assert not found.dirty
    (tmp_path / "package" / "__init__.py").write_text("changed")
    changed = commit(tmp_path / "package")
    assert changed is not None
    assert changed.dirty


def test_results_need_no_torch() -> None:
    imports = (
        "import sys; import edge_fl_server.runs.results; from edge_fl_server.runs.results import provenance"
    )
    code = f"{imports}; provenance(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
    assert provenance().edge_fl
