"""Figures are reproducible, need no display, and show the measured values; separation and CKA similarity follow their formulas."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_fl import cli
from edge_fl.console.progress import Count
from edge_fl.errors import InputError
from edge_fl.metrics import summarise_reports
from edge_fl_lab import features
from edge_fl_lab.compare import comparison
from edge_fl_lab.compare.grid import cells
from edge_fl_lab.report import comparison_page, page, plots, run_plots, style
from edge_fl_lab.report.plots import Curve, Mark, Points
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics

RNG = np.random.default_rng(0)
CURVE = Curve([1, 2, 3], np.array([0.2, 0.5, 0.6]), np.array([0.1, 0.0, 0.05]), after=0.8)
MARKS = {"local": Mark(0.7, 0.02), "fedavg": Mark(0.9, 0.01, 3.0), "fedcgs": Mark(0.8, 0.03, 0.1)}
POINTS = Points(RNG.normal(size=(30, 2)).astype(np.float32), np.arange(30) % 3, ["a", "b", "c"])
SMALL = ["data.fraction=0.2", "model.options={feature_dim=8, width=4}"]

DRAWN = {
    "labels": lambda: plots.labels(np.array([[3, 0], [1, 5]]), ["c000", "c001"], ["cat", "dog"]),
    "accuracy": lambda: plots.accuracy({"fedavg": CURVE, "fedrep": CURVE}, "accuracy", "Mean over 3 seeds; band: ±1 std over seeds."),
    "log": lambda: plots.accuracy({"fedavg": CURVE}, "accuracy", "A note.", step="MB", log=True),
    "panels": lambda: plots.accuracy({f"method-{n}": CURVE for n in range(9)}, "accuracy", "A note."),
    "final": lambda: plots.final({"fedavg": Mark(0.9, 0.01), "fedrep": Mark(0.8, float("nan"))}, "accuracy", "A note."),
    "clients": lambda: plots.clients({"fedavg": [0.5, 0.6, 1.0], "fedrep": [0.7]}, "accuracy", plots.BOX),
    "by-cost": lambda: plots.by_cost(MARKS, "accuracy", "MB", "A note."),
    "embedding": lambda: plots.embedding({"fedavg": POINTS, "fedrep": POINTS}),
    "separation": lambda: plots.separation({"fedavg": (0.5, 0.1), "fedrep": (0.6, 0.0)}, "method"),
    "cka-similarity": lambda: plots.similarity(np.array([[1.0, 0.3], [0.3, 1.0]]), ["fedavg", "fedrep"], "method"),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_the_same_bytes_every_time(name: str, tmp_path: Path) -> None:
    first = style.save(DRAWN[name](), tmp_path / "first", name)
    second = style.save(DRAWN[name](), tmp_path / "second", name)
    assert [path.suffix for path in first] == [".pdf", ".svg", ".png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    width, height = struct.unpack(">II", first[2].read_bytes()[16:24])
    assert width > 300 and height > 200


def test_an_inline_figure_has_no_external_reference_and_ids_of_its_own() -> None:
    first, second = (style.inline(DRAWN["accuracy"](), "Accuracy <by> round", salt) for salt in ("a", "b"))
    assert first.startswith("<svg") and not re.search(r"http|<!|xmlns|href=\"[^#]|url\((?!#)", first)
    assert not set(re.findall(r' id="([^"]+)"', first)) & set(re.findall(r' id="([^"]+)"', second))
    assert "var(--line)" in first and "#000000" not in first and "var(--c0)" in first
    assert (
        'role="img" aria-label="Accuracy &lt;by&gt; round"' in first
        and ">mean" not in first
        and ">accuracy, %</text>" in first
    )


def test_pictures_need_no_display_and_leave_pyplot_alone() -> None:
    code = "import sys; from edge_fl_lab.report import plots, style; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_dot_s_area_is_its_number_of_images() -> None:
    picture = plots.labels(np.array([[4, 0], [2, 1]]), ["c000", "c001"], ["cat", "dog"])
    dots = picture.axes[0].collections[0]
    assert dots.get_offsets().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert (dots.get_sizes() / dots.get_sizes().max()).tolist() == [1.0, 0.5, 0.25]


def test_no_two_of_the_first_forty_series_look_alike() -> None:
    assert len({tuple(style.mark(n).values()) for n in range(40)}) == 40
    assert len({tuple(style.line(n).values()) for n in range(40)}) == 40


def test_the_final_personalisation_is_drawn_only_if_it_changes_the_accuracy() -> None:
    assert CURVE.final == 0.8
    assert Curve([1], np.array([0.8]), np.array([0.0]), after=0.8).final is None
    assert Curve([1], np.array([0.8]), np.array([0.0])).final is None


def test_class_separation_is_one_for_points_and_none_for_noise() -> None:
    y = np.repeat([0, 1], 50)
    assert features.separation(np.eye(2, dtype=np.float32)[y], y) == pytest.approx(1)
    noise = RNG.normal(size=(4000, 8)).astype(np.float32)
    assert features.separation(noise, np.arange(4000) % 2) == pytest.approx(0, abs=0.01)
    # By hand: two classes at right angles, each of two vectors 90 degrees apart: within 1/2, in all 1 - |mean|^2.
    z = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.float32)
    assert features.separation(z, np.array([0, 0, 1, 1])) == pytest.approx(1 - 0.5 / 0.75)
    assert np.isnan(features.separation(z, np.zeros(4, np.int64)))


def test_cka_similarity_ignores_rotation_and_scale_and_sees_difference() -> None:
    a = RNG.normal(size=(200, 6)).astype(np.float32)
    turn, _ = np.linalg.qr(RNG.normal(size=(6, 6)))
    assert features.linear_cka(a, (3 * a @ turn + 5).astype(np.float32)) == pytest.approx(1, abs=1e-5)
    assert features.linear_cka(a, RNG.normal(size=(200, 4)).astype(np.float32)) < 0.1


def test_tsne_is_deterministic_and_takes_few_points() -> None:
    z = RNG.normal(size=(20, 5)).astype(np.float32)
    assert np.array_equal(features.tsne(z), features.tsne(z))
    assert features.tsne(z[:3, :1]).shape == (3, 2)


@pytest.mark.parametrize(("low", "high"), [(3.1, 4.4), (0.21, 0.35), (3.0, 35.0), (0.1, 300.0)])
def test_a_log_axis_has_at_least_two_plain_numbers(low: float, high: float) -> None:
    curve = Curve([low, (low * high) ** 0.5, high], CURVE.mean, CURVE.std)
    picture = plots.accuracy({"fedavg": curve}, "accuracy", "A note.", step="MB", log=True)
    picture.draw_without_rendering()
    left, right = picture.axes[0].get_xlim()
    ticks = zip(picture.axes[0].get_xticklabels(), picture.axes[0].get_xticks(), strict=True)
    shown = [label.get_text() for label, at in ticks if left <= at <= right]
    assert len(shown) > 1 and all(float(text) for text in shown) and not any("e" in text for text in shown)


def test_a_method_that_predicts_only_at_the_end_is_drawn_there_below_a_tick() -> None:
    ends = Curve([], np.array([]), np.array([]), after=0.95)
    picture = plots.accuracy({"fedavg": CURVE, "fedcgs": ends}, "accuracy", "A note.")
    picture.draw_without_rendering()
    (axes,) = picture.axes
    (line,) = (line for line in axes.get_lines() if line.get_label() == "fedcgs, at the end")
    assert (line.get_xdata(), line.get_ydata(), line.get_marker()) == ([3], [95.0], "D")
    assert line.get_color() == style.line(1)["color"]
    assert max(axes.get_yticks()) >= 95 and axes.get_ylim()[1] >= max(axes.get_yticks())


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished simulation."""
    command = ["simulate", "--method", "fedper", "--clients", "3", "--rounds", "1", "--runs", str(tmp_path)]
    assert cli.main([*command, *(word for setting in SMALL for word in ("--set", setting))]) == 0
    capsys.readouterr()
    return next(tmp_path.iterdir())


def test_a_run_is_drawn_from_its_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plots", run.name, "--runs", str(run.parent)]) == 0
    printed = capsys.readouterr()
    names = {Path(line).name for line in printed.out.split()}
    assert "not drawn: accuracy: fewer than two rounds were evaluated" in printed.err
    drawn = (
        "labels-by-client",
        "clients",
        "features",
        "separation",
    )  # one round is no curve, one extractor no matrix
    assert names == {f"{name}.{ending}" for name in drawn for ending in ("pdf", "svg", "png")}
    assert set(run_plots.ABSENT) >= set(drawn)
    assert all((run / "plots" / name).stat().st_size for name in names)


def test_a_new_task_learns_on_a_finished_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["newtask", run.name, "--runs", str(run.parent), "--dataset", "digits", "--clients", "3"]
    assert cli.main([*command, "--iterations", "20", "--format", "json"]) == 0
    assert '"iterations": 20' in capsys.readouterr().out


def test_a_run_of_devices_is_drawn_without_their_data(tmp_path: Path) -> None:
    with Results.create(tmp_path, Recipe(source="fleet")) as results:
        for round, values in enumerate([(0.5, 0.6), (0.7, 0.8)], 1):
            found = {f"d{n}": {"global.test_acc": value} for n, value in enumerate(values)}
            results.append_round(
                RoundMetrics(round=round, metrics=summarise_reports(list(found.values())), clients=found)
            )
    files, absent = run_plots.of_run(results)
    (why,) = (why for why, which in absent.items() if "features" in which)
    assert absent[why] == list(run_plots.TRAINED) and "are on the devices" in why
    names = {path.name for path in files}
    assert names == {
        f"{name}.{ending}" for name in ("accuracy", "clients") for ending in ("pdf", "svg", "png")
    }
    with Results.create(tmp_path, Recipe(source="fleet")) as empty:
        pass
    assert not empty.plots.exists()  # no empty folder where a reader looks for figures
    with pytest.raises(InputError, match="are on the devices"):
        run_plots.of_run(empty)


def test_a_curve_says_its_clients_and_fades_where_few_measured_it(tmp_path: Path) -> None:
    with Results.create(tmp_path, Recipe(source="fleet")) as results:
        for round, n in enumerate([10, 9, 2], 1):
            found = {f"d{client}": {"global.test_acc": 0.5 + round / 10} for client in range(n)}
            results.append_round(
                RoundMetrics(round=round, metrics=summarise_reports(list(found.values())), clients=found)
            )
    drawn = next(page.figures_of(page.report(results))).figure
    faint, full = drawn.axes[0].get_lines()
    assert faint.get_alpha() == plots.FADED and len(faint.get_xdata()) == 3
    assert np.isnan(full.get_ydata()).tolist() == [False, False, True]
    assert drawn.get_supxlabel().startswith("Mean over n = 2 to 10 clients, faded below 5;")


def test_a_comparison_is_drawn_with_every_method_in_it(tmp_path: Path) -> None:
    base = with_settings(Recipe(), ["data.clients=3", "rounds=1", *SMALL])
    grid = cells(base, ["ditto"])
    found = comparison.run(grid, tmp_path)
    counts: list[Count] = []
    paths = comparison_page.save(grid, found, tmp_path, counts.append)
    saved = [count for count in counts if count.stage == "plots"]
    assert [count.done for count in saved] == list(range(1, saved[-1].of + 1)) and 3 * len(saved) == len(
        paths
    )
    names = {path.name for path in paths}
    for what in (
        "labels-by-client",
        "final",
        "clients",
        "accuracy-against-bytes",
        "separation",
        "cka-similarity",
        "features-by-class",
        "features-by-client",
    ):
        assert {f"digits-dirichlet-0.3-{what}.{ending}" for ending in ("pdf", "svg", "png")} <= names
    assert not any("accuracy." in name for name in names)  # a single round is no curve
    final = next(comparison_page.of_cells(grid, found, tmp_path))
    labels = [label.get_text() for label in final.figure.axes[0].get_yticklabels()]
    assert final.name.endswith("-final") and labels == ["local", "fedavg", "fedavg+ft", "ditto"]
    note = final.figure.get_supxlabel()
    assert note == "Mean over 1 seed of 3 clients; bars: 95 % CI over clients."
    assert list(comparison_page.of_cells(grid[:1], found, tmp_path)) == []  # one method is no comparison


def test_a_client_with_its_own_extractor_is_seen_through_it(tmp_path: Path) -> None:
    """Ditto's clients have a personal and a shared model: their features are not FedAvg's."""
    base = with_settings(Recipe(), ["data.clients=3", "rounds=1", *SMALL])
    grid = {cell.label: cell for cell in cells(base, ["ditto"])}
    found = comparison.run(list(grid.values()), tmp_path)
    seen = {
        label: comparison_page.cell_runs.read_probe(found[cell.key], tmp_path) for label, cell in grid.items()
    }
    fedavg, tuned, ditto = seen["fedavg"], seen["fedavg+ft"], seen["ditto"]
    assert fedavg and tuned and ditto
    assert np.array_equal(fedavg.y, ditto.y) and np.array_equal(fedavg.client, ditto.client)
    assert np.array_equal(fedavg.z, tuned.z) and not np.allclose(fedavg.z, ditto.z)


def test_separation_is_measured_within_each_client() -> None:
    """Networks that differ, not classes, would part the clients' images: within a client nothing is separated here."""
    z = np.repeat(np.eye(2, dtype=np.float32), 4, axis=0)
    seen = features.FeatureProbe(z, np.array([0, 0, 1, 1, 2, 2, 3, 3]), np.repeat([0, 1], 4), ("c0", "c1"))
    assert features.separation(z, seen.y) > 0.9
    assert all(not value > 0 for value in seen.separation().values())
