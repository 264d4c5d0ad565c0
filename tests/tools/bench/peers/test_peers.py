"""The comparison with other simulators: its split, its table, and tiny runs of its sides."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tools.bench.measure import Machine, family
from tools.bench.peers import cli, report, split, workload
from tools.bench.peers.cases import CASES, QUICK_IMAGES, Size
from tools.bench.peers.compare import commands, compared, difference
from tools.bench.peers.job import Job
from tools.bench.peers.report import Compared, Report, Result
from tools.bench.peers.side import ENVIRONMENTS, Command, Side

EDGE, PLAIN = Command("edge-fl", threads=1), Command("plain", threads=1)  # fast next to other tests
CHECKOUT = os.environ.get("EDGE_FL_PFLLIB", "")
pytestmark = pytest.mark.timeout(300)


def result(side: str, *seconds: float, **changes: object) -> Result:
    settings = {"first_s": 5.0, "peak": 10**9, "difference": None if side == "edge-fl" else 1e-7}
    return Result(side, seconds=list(seconds), **(settings | changes))  # type: ignore[arg-type]


def case(*others: Result) -> Compared:
    ours = result("edge-fl", 1.0, 2.0, 1.0, about={"version": "0.1", "setting": "pool"})
    return Compared("FedAvg", 20, 213, [ours, *others])


def cells(found: Compared) -> list[tuple[str, ...]]:
    return list(report.rows(found))


def running(pid: int) -> bool:
    """Whether a process still runs after a minute; one that only waits to be reaped does not."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.1)
    return True


def test_the_ratio_is_the_median_of_the_turns() -> None:
    ours, theirs = cells(case(result("PFLlib", 2.0, 3.0, 4.0)))
    assert ours[:4] == ("FedAvg (20 clients, 213 steps an epoch)", "edge-fl 0.1, pool", "1 (1 to 2)", "")
    assert theirs == ("", "PFLlib", "3 (2 to 4)", "2.00 (1.50 to 4.00)", "5.0 s", "1,000 MB", "1.0e-07")


def test_a_side_with_other_weights_has_no_ratio() -> None:
    for apart in (2e-5, float("nan"), None):
        assert cells(case(result("PFLlib", 2.0, 3.0, 4.0, difference=apart)))[1][3] == "not comparable"


def test_only_the_faster_setting_of_a_side_is_shown() -> None:
    failed = result("PFLlib", error="no memory")
    slow, fast = result("PFLlib", 9.0, 9.0, 9.0), result("PFLlib", 2.0, 2.0, 2.0)
    assert case(failed, slow, fast).shown()[1:] == case(fast, slow, failed).shown()[1:] == [fast]


def test_a_side_that_fails_is_reported_with_its_error() -> None:
    found = cells(case(result("Flower", error="not installed"), result("PFLlib", 2.0, 3.0, 4.0)))
    assert found[1] == ("", "Flower", "failed: not installed", "", "", "", "")
    assert found[2][3] == "2.00 (1.50 to 4.00)"
    ours = Compared("FedAvg", 20, 213, [result("edge-fl", error="no memory"), result("PFLlib", 2.0)])
    assert cells(ours)[1][3] == "edge-fl failed"


def test_the_report_is_a_markdown_table_with_the_machine(tmp_path: Path) -> None:
    found = Report(Machine(2, 1, (0.5, 1.5), 100.0, "2.15", "cpu"), [case(result("PFLlib", 2.0, 3.0, 4.0))])
    cli.save(found, tmp_path)
    lines = (tmp_path / "peers.md").read_text().splitlines()
    assert lines[0].startswith("2 cores, 1 threads, cpu, torch 2.15")
    assert len({line.count("|") for line in lines[2:]}) == 1 and len(lines) == 6
    assert (tmp_path / "peers.json").exists()


def test_every_image_is_in_at_most_one_set_and_training_sets_are_whole_batches() -> None:
    y = np.random.default_rng(0).integers(0, 10, 3000)
    clients = split.draw(y, Size(20, 3000, (3, 32, 32), 0.1), np.random.default_rng(1))
    every = np.concatenate([rows for sets in clients for rows in sets])
    assert len(clients) == 20 and len(np.unique(every)) == len(every) > 2800
    assert all(len(train) % split.BATCH_SIZE == 0 and len(train) >= 30 for train, _ in clients)
    assert all(len(test) >= 10 for _, test in clients), "PFLlib needs a batch for testing"
    classes = [len(np.unique(y[np.concatenate(sets)])) for sets in clients]
    assert np.mean(classes) < 7, "a concentration of 0.1 gives few classes per client"


def test_a_job_has_the_same_images_and_batches_for_all_sides(tmp_path: Path) -> None:
    steps = workload.write(tmp_path, "fedrep", quick=True)
    job = Job(tmp_path)
    images = np.load(tmp_path / "images.npz")
    assert job.clients == QUICK_IMAGES.clients and steps == sum(order.shape[1] for order in job.orders)
    for client, order in enumerate(job.orders):
        x, y = job.samples(client)
        assert order.shape[0] == 11, "ten head epochs and one of the extractor"
        assert all(sorted(epoch.flatten()) == list(range(len(y))) for epoch in order)
        assert -1 <= x.min() < 0 < x.max() <= 1
        assert (images["x"] == ((x[0] + 1) * 127.5).round().byte().numpy()).all(axis=(1, 2, 3)).any()
    for parameter, start in zip(job.network().parameters(), job.start, strict=True):
        assert (parameter == start).all()


def test_weights_of_different_shape_or_name_are_infinitely_different() -> None:
    one = {"shared/0": np.zeros(3)}
    assert difference(one, {"shared/0": np.array([0.0, 0.5, -2.0])}) == 2.0
    assert difference(one, {"shared/0": np.zeros(4)}) == float("inf")
    assert difference(one, {"shared/1": np.zeros(3)}) == float("inf")


def test_edge_fl_and_the_plain_loop_train_the_same_in_turns() -> None:
    found = compared("linear", [EDGE, PLAIN], 2, quick=True)
    assert [each.error for each in found.results] == ["", ""]
    ours, plain = found.results
    assert ours.about["setting"] in {"sequential", "pool", "vector"}
    assert plain.difference is not None and plain.difference < 1e-6
    assert len(ours.seconds) == len(plain.seconds) == 2
    assert all(50e6 < each.peak < 20e9 and each.first_s > 0 for each in found.results)


def test_a_side_that_cannot_start_leaves_the_others(tmp_path: Path) -> None:
    missing = Command("flower", ENVIRONMENTS / "none" / "bin" / "python")
    found = compared("linear", [PLAIN, Command("pfllib", arguments=(str(tmp_path),)), missing], 1, True)
    plain, pfllib, flower = found.results
    assert len(plain.seconds) == 1
    assert "flcore" in pfllib.error, "the last lines of its log"
    assert flower.error == "not installed: no .venvs/none/bin/python"


def test_no_process_of_a_side_remains(tmp_path: Path) -> None:
    workload.write(tmp_path, "linear", quick=True)
    with Side(EDGE, tmp_path, tmp_path / "log") as side:
        side.round()
        members = family(side.pid)
    assert side.pid in members
    assert not [pid for pid in members if running(pid)]


def test_the_sides_of_a_case(tmp_path: Path) -> None:
    kinds = [command.kind for command in commands(CASES["fedavg"], tmp_path)]
    assert kinds == ["edge-fl", "pfllib", "pfllib", "plain", "flower", "pfl-research"]
    assert [command.kind for command in commands(CASES["ditto"], None)] == ["edge-fl"]
    assert commands(CASES["ditto"], None)[0].python == Path(sys.executable)


def test_wrong_options_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--methods", "fedsgd"], "unknown method 'fedsgd', expected fedavg"),
        (["--pfllib", str(tmp_path)], "expected a checkout of PFLlib"),
    ):
        with pytest.raises(SystemExit):
            cli.main(options)
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="EDGE_FL_PFLLIB names no checkout of PFLlib")
@pytest.mark.parametrize("name", CASES)
def test_pfllib_trains_the_same(name: str) -> None:
    theirs = Command("pfllib", arguments=(CHECKOUT,), threads=1)
    found = compared(name, [EDGE, theirs], 1, quick=True)
    assert [each.error for each in found.results] == ["", ""]
    assert found.results[1].difference is not None and found.results[1].difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flower", "pfl-research"])
@pytest.mark.parametrize("name", ["fedavg", "linear"])
def test_other_simulators_train_the_same(name: str, kind: str) -> None:
    theirs = Command.separate(kind)
    if not theirs.python.exists():
        pytest.skip(f"{kind} is not installed (make bench-peers)")
    found = compared(name, [PLAIN, theirs], 1, quick=True)
    assert [each.error for each in found.results] == ["", ""]
    assert found.results[1].difference is not None and found.results[1].difference < 1e-6
