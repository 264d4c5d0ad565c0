"""The benchmark reports its figures, and no number if the two sides did not compute the same."""

import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

from edge_fl.wire.endpoint import Endpoint
from edge_fl_broker.find import Program
from edge_fl_server.training.studies import ClientStore
from tools.bench import (
    backbone,
    cli,
    cohort,
    messages,
    operators,
    plain,
    plot,
    regret,
    releasing,
    table,
    training,
    workloads,
)
from tools.bench.figures import Figure, Report
from tools.bench.measure import Machine, Times, gemm_peak, tree_bytes
from tools.bench.plain import PlainLoop

MACHINE = Machine(2, 1, (0.5, 1.5), 100.0, "2.15", "cpu")


def times(*seconds: float) -> Times:
    return Times(list(seconds), list(seconds))


def figure(**changes: object) -> Figure:
    settings = {"sides": {"plain": times(4, 9, 2), "pool": times(2, 3, 2)}, "ours": "pool", "target": 2.0}
    return Figure("A1", "a round", **(settings | changes))  # type: ignore[arg-type]


def small(model: str = "", **changes: object) -> Figure:
    """Two or three small clients trained by the sequential engine and the plain loop."""
    study = (
        workloads.work_a(model=model, clients=2, samples=16)
        if model
        else workloads.heads(clients=3, samples=60)
    )
    opponent = PlainLoop(ClientStore.of(study), plain.fedavg)
    for name, value in changes.items():
        setattr(opponent, name, value)
    figure = Figure("A1", "small clients", 2.0, ours="sequential")
    return training.compared(figure, study, opponent, 1)


def test_the_figure_is_the_median_of_the_turns_ratios() -> None:
    assert figure().ratios == [2, 3, 1]
    assert figure().found == 2
    assert figure().verdict == "reached"
    assert figure(target=2.1).verdict == "missed"


def test_an_upper_limit_is_reached_from_below() -> None:
    assert figure(value=1.9, at_most=True).verdict == "reached"
    assert figure(value=2.1, at_most=True).verdict == "missed"


@pytest.mark.parametrize("model", ["", "cnn2", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_the_plain_loop_trains_what_the_engines_train(model: str) -> None:
    found = small(model)
    assert found.difference is not None and 0 < found.difference < (1e-3 if model == "resnet18" else 1e-6)
    assert found.sides.keys() == {"plain", "sequential"}
    assert found.peak is not None and 0 < found.peak < 15


def test_the_limiting_operator_is_a_convolution() -> None:
    found = operators.of_step(workloads.work_a(clients=1, samples=40), 3)
    # On a busy machine the forward pass may take longer, and a product's peak be found too low: not by a factor of ten.
    assert found.what.startswith("aten::convolution") and 0 < found.found < 1500
    assert float(found.notes["aten::convolution_backward, ms a step"]) > 0


def test_sides_with_different_results_are_not_comparable() -> None:
    found = small(lr=0.06)
    assert found.verdict == "not comparable"
    row = table.row(found)
    assert "not comparable" in row and row[2] == "-" and row[5] == "", "a number could be quoted"


def test_the_table_names_the_machine_and_every_figure() -> None:
    report = Report(MACHINE, [figure(notes={"rounds": 5.0}), figure(target=0.0)])
    text = " ".join(table.render(report).split())
    assert "GEMM peak 100 GFLOP/s; load average 0.5 before, 1.5 after" in text
    assert "A1 a round 2x >= 2x reached 1.00 to 3.00 4 / 2 rounds: 5 A1 a round 2x 1.00 to 3.00 4 / 2" in text


def test_the_report_is_written_as_json_text_and_plot(tmp_path: Path) -> None:
    report = Report(MACHINE, [figure(), figure(difference=1.0)])
    cli.save(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json",
        "bench.txt",
        "bench.pdf",
        "bench.svg",
        "bench.png",
    }
    assert msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report) == report
    assert plot.save(Report(MACHINE, [figure(difference=1.0)]), tmp_path) == [], "nothing to compare"


def test_beyond_the_target_is_above_one_for_limits_too() -> None:
    assert plot.reached(figure(target=4.0)) == 0.5
    assert plot.reached(figure(value=1.0, target=2.0, at_most=True)) == 2.0


def test_the_command_measures_the_given_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["head-logistic", "--turns", "1", "--out", str(tmp_path)])
    assert "head logistic" in capsys.readouterr().out
    assert len(msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report).figures) == 1


def test_without_a_broker_the_other_figures_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(turns: int) -> Figure:
        with subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"]) as process:
            messages.wait_for(Endpoint("127.0.0.1", 1), process)
        return figure()

    assert list(cli.measured({"round-trip": refused, "other": lambda turns: figure()}, 1)) == [figure()]
    assert (
        "round-trip: mqtt://127.0.0.1:1: `edge-fl broker up` ended with exit code 2"
        in capsys.readouterr().out
    )


def test_an_unknown_figure_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["fedsgd"])
    assert "unknown figure 'fedsgd', expected fedavg" in capsys.readouterr().err


def test_a_release_is_exported_and_published(tmp_path: Path) -> None:
    found = releasing.released("cnn2", 1)
    assert 3 < float(found.notes["ONNX MB"]) < 4
    assert found.sides.keys() == {"export", "publish"}


def test_memory_counts_a_process_and_its_children() -> None:
    code = "x = bytearray(b'1') * 50_000_000; print(1, flush=True); input()"
    shell = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])",
    ]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 50e6 < tree_bytes(process.pid) < 150e6
        process.communicate(b"\n", timeout=60)


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[::4096])
print(1, flush=True)
input()
"""


def test_memory_does_not_depend_on_other_programs_that_map_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(50_000_000))
    command = [sys.executable, "-c", READER, str(path)]
    with ExitStack() as stack:
        found = []
        for _ in range(2):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            found.append(process.pid)
        assert 50e6 < tree_bytes(found[0]) < 90e6


def test_the_regret_is_that_of_the_worst_workload() -> None:
    tiny = {str(clients): partial(workloads.heads, clients=clients, samples=60) for clients in (2, 3)}
    found = regret.measured("regret", "tiny", 1, tiny)
    assert found.found >= 1 and found.at_most
    assert found.notes.keys() == {"worst", "2", "3"}
    assert f"{found.found:.2f} (" in str(found.notes[str(found.notes["worst"])])


def test_the_busy_process_ends_with_its_block() -> None:
    with regret.busy_core() as process:
        assert process.poll() is None
    assert process.poll() is not None


def test_the_peak_is_that_of_the_fastest_products() -> None:
    assert gemm_peak(times(2.0, 1.0), size=500) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_cohorts_memory_is_measured_in_its_own_process() -> None:
    found = cohort.cohorts(1, sizes=(2,))
    assert found.at_most and 0.1 < found.found < 2.0
    assert float(found.notes["s at 2"]) > 0


@pytest.mark.broker
def test_a_message_and_its_reply_are_timed(mosquitto_program: Program) -> None:
    found = messages.round_trip(1, messages=30)
    assert 0 < found.found < 1000 and found.notes["messages"] == 20


@pytest.mark.slow
def test_a_device_computes_the_features_of_plain_onnxruntime() -> None:
    found = backbone.extraction(1)
    assert found.difference is not None and found.difference < 1e-5 and found.ratios
