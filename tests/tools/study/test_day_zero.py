"""The study of few labels: cells and their files, heads on a made-up cell, the table and its acceptance, and a small run through it all."""

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl.console import tables
from edge_fl.data.samples import Array
from edge_fl.errors import DataError
from edge_fl.heads import HeadPlan
from edge_fl_lab import day_zero as shipped
from tools.study import day_zero, day_zero_cells
from tools.study import day_zero_training as training
from tools.study.day_zero import LABELS, Line, Score
from tools.study.day_zero_cells import About, Cell
from tools.study.day_zero_heads import FLEET, OWN, SERVED, Fitted, fleets_head
from tools.study.day_zero_training import Place, Sizes
from tools.study.predictions import DOMAINS

CLASSES, DIM = 3, 8


def made(head: str = "head", devices: int = 4, labels: int = 45, tests: int = 50) -> Cell:
    """Separable classes; device 0 has class 0 alone. The shared head is that of the classes' centres."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, DIM))

    def features(y: Array) -> Array:
        return (centres[y] + 0.7 * rng.normal(size=(len(y), DIM))).astype(np.float32)

    each = [rng.integers(0, CLASSES if device else 1, labels + tests) for device in range(devices)]
    y, fleet_y = np.concatenate(each), rng.integers(0, CLASSES, 90)
    about = About("made", "fedavg", 0, ("made",) * devices, CLASSES, False, HeadPlan(), head)
    return Cell(
        about,
        features(y),
        y,
        np.repeat(np.arange(devices), labels + tests),
        np.tile(np.arange(labels + tests) >= labels, devices),
        features(fleet_y),
        fleet_y,
        np.repeat([0, 1], 45),
        np.stack([np.bincount(part, minlength=CLASSES) for part in np.split(fleet_y, 2)]),
        centres.astype(np.float32) if head else np.empty(0, np.float32),
        -(centres**2).sum(1).astype(np.float32) / 2 if head else np.empty(0, np.float32),
    )


@pytest.mark.parametrize("head", ["head", ""])
def test_a_cell_is_read_as_it_was_written(head: str, tmp_path: Path) -> None:
    cell, path = made(head), tmp_path / "new" / "cell.npz"
    day_zero_cells.write(path, cell)
    found = day_zero_cells.read(path)
    assert found.about == cell.about
    for name in day_zero_cells.arrays_of(day_zero_cells.Cell):
        assert np.array_equal(getattr(found, name), getattr(cell, name))
    assert ("weight" in np.load(path).files) == bool(head)
    np.savez(path, z=cell.z)
    with pytest.raises(DataError, match="not a cell of the study"):
        day_zero_cells.read(path)


def test_labels_of_a_device_grow_from_its_first_and_no_head_sees_a_test_image() -> None:
    cell, seen = made(), dict[tuple[int, int], set[bytes]]()

    def recording(z: Array, y: Array, cell: Cell) -> Fitted:
        seen[len(seen) // len(LABELS), len(y)] = {row.tobytes() for row in z}
        return fleets_head(z, y, cell)

    scores = [*day_zero.evaluate(cell, {OWN: recording})]
    assert [(score.labels, score.count) for score in scores[: len(LABELS)]] == [
        ("0", 0), ("1", 1), ("3", 3), ("10", 10), ("40", 40), ("all", 45)
    ]  # fmt: skip
    for device in range(4):
        tests = {row.tobytes() for row in cell.z[cell.tests(device)]}
        sets = [seen[device, count] for count in (0, 1, 3, 10, 40, 45)]
        assert all(few < more for few, more in pairwise(sets))
        assert not sets[-1] & tests


def test_the_heads_of_a_cell_without_with_few_and_with_many_labels() -> None:
    found = {
        (number // len(LABELS), s.labels): s.accuracy for number, s in enumerate(day_zero.evaluate(made()))
    }
    for device in range(4):
        assert found[device, "0"][OWN] == 0  # nothing to predict with
        assert found[device, "0"][SERVED] == found[device, "0"][FLEET] > 60
    assert found[0, "1"][OWN] == 100  # it has one class, and predicts it
    assert found[0, "all"][SERVED] > found[0, "all"][FLEET]  # its shares rule the other classes out
    assert max(found[device, "1"][OWN] for device in (1, 2, 3)) < 60
    assert min(found[device, "all"][OWN] for device in (1, 2, 3)) > 75


def test_without_a_shared_head_the_fleets_head_is_fitted_on_the_full_devices() -> None:
    cell = made("")
    predicted = fleets_head(cell.z[:0], cell.y[:0], cell).logits(cell.z).argmax(1)
    assert (predicted == cell.y).mean() > 0.8


def scores(served: list[float], own: float = 60, fleet: float = 80) -> list[Score]:
    return [Score("made", "fedavg", "10", 10, {OWN: own, FLEET: fleet, SERVED: value}) for value in served]


@pytest.mark.parametrize(
    ("served", "losing", "holds"),
    [
        ([80.0] * 10, 0.0, True),
        ([77.0] + [82.0] * 9, 0.0, True),  # 3 points below, not more
        ([76.9] + [82.0] * 9, 0.1, True),
        ([76.9] * 2 + [82.0] * 8, 0.2, False),
        ([79.6] * 10, 0.0, True),
        ([79.4] * 10, 0.0, False),
    ],
)
def test_a_line_holds_if_the_mean_is_kept_and_one_device_in_ten_loses(
    served: list[float], losing: float, holds: bool
) -> None:
    line = Line("made", "fedavg", "10", scores(served))
    assert (line.better, line.losing, line.holds) == (FLEET, losing, holds)


def test_a_device_is_measured_against_its_own_better_head_and_the_mean_against_the_better_mean() -> None:
    line = Line("made", "fedavg", "all", [*scores([78.0], 90, 60), *scores([82.0, 84.0])])
    assert line.better == FLEET  # 73.3 against 70
    assert line.losing == pytest.approx(1 / 3)  # 78 is below that device's own 90
    gain = line.gain(FLEET)
    assert gain is not None and gain.mean == pytest.approx((18 + 2 + 4) / 3) and gain.n == 3
    assert gain.low < gain.mean < gain.high


def test_the_table_has_a_line_for_each_number_of_labels() -> None:
    found = day_zero.lines([*day_zero.evaluate(made()), *day_zero.evaluate(made())])
    assert [(line.labels, len(line.scores)) for line in found] == [(labels, 8) for labels in LABELS]
    shown = tables.markdown(day_zero.table(found)).splitlines()
    headings = next(line for line in shown if line.startswith("| data set"))
    assert headings == (
        "| data set | method | labels | n | own only | fleet's head | served | served - better | served - own | served - fleet"
        " | more than 3 below | holds |"
    )
    first = next(line for line in shown if line.startswith("| made | fedavg | 0 | 8 | 0.0 |"))
    assert first.endswith("| +0.0 (+0.0 to +0.0) | 0 % | yes |")
    assert shown[-1] == f"{sum(line.holds for line in found)} of 6 lines hold."


def test_means_are_written_as_the_recommendation_reads_them() -> None:
    found = msgspec.json.decode(msgspec.json.encode(day_zero.result(day_zero.lines(day_zero.evaluate(made())))),
                                type=shipped.DayZero)  # fmt: skip
    assert [row.labels for row in found.rows] == [0, 1, 3, 10, 40, 45]
    assert {(row.dataset, row.method, row.devices) for row in found.rows} == {("made", "fedavg", 4)}
    assert found.rows[0].own == 0 and found.rows[0].served == found.rows[0].fleet > 60


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two head-only devices, one round, and few images."""
    monkeypatch.setattr(training, "DEVICES", 2)
    sizes = {"digits": Sizes(30, 50, 40, 1, 1), training.PACS: Sizes(0, 20, 30, 0, 0)}
    monkeypatch.setattr(training, "SIZES", sizes)


@pytest.mark.usefixtures("small")
def test_a_small_study_is_interrupted_continued_and_ends_in_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--datasets", "digits", "--methods", "fedcrc,fedrep", "--seeds", "1", "--out", str(tmp_path)]
    day_zero.main([*options, "--minutes", "0"])
    assert capsys.readouterr().out.startswith("paused")
    assert not [*tmp_path.glob("*.npz")]
    day_zero.main(options)
    shown = capsys.readouterr().out
    assert "| digits | fedcrc | 0 | 2 | 0.0 |" in shown and "| digits | fedrep | all | 2 |" in shown
    answer = shipped.recommend(shipped.load(tmp_path / "day_zero.json"), 10, 4, 30)
    assert {row.method for row in answer.rows} == {"fedcrc", "fedrep"}
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    day_zero.main(options)
    assert capsys.readouterr().out == shown
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")} == stored and len(stored) == 2
    heads = [
        day_zero_cells.read(tmp_path / f"digits-{name}-0.npz").about.head for name in ("fedcrc", "fedrep")
    ]
    assert heads == ["global_head", ""]


@pytest.mark.usefixtures("small")
def test_a_cell_of_other_settings_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("digits", "fedavg", 0)
    first = training.made(place, tmp_path, tmp_path)
    monkeypatch.setitem(training.SIZES, "digits", Sizes(30, 20, 40, 1, 1))
    second = training.made(place, tmp_path, tmp_path)
    assert first and second
    assert (len(first.labels(0)), len(second.labels(0))) == (50, 20)


def test_head_only_devices_get_no_image_that_trained_the_extractor(tmp_path: Path, small: None) -> None:
    cell = training.trained(Place("digits", "fedavg", 1), tmp_path)
    trained = {row.tobytes() for row in cell.fleet_z}
    for device in range(2):
        own, tests = cell.labels(device), cell.tests(device)
        assert (len(own), len(tests)) == (50, 40)
        assert not {row.tobytes() for row in cell.z[np.concatenate([own, tests])]} & trained
    assert cell.counts.sum(1).tolist() == [30] * 4
    assert np.array_equal(cell.counts[2], np.bincount(cell.fleet_y[cell.fleet_device == 2], minlength=10))


def test_a_used_up_class_gives_fewer_images_without_repetition() -> None:
    y = np.repeat([0, 1], [5, 100])
    rows = training.drawn(y, np.arange(105), np.array([0.5, 0.5]), 60, np.random.default_rng(0))
    assert len(set(rows.tolist())) == len(rows) < 60
    assert (y[rows] == 0).sum() == 5


@pytest.mark.usefixtures("small")
def test_a_domain_of_pacs_is_a_device_and_several_and_the_others_are_its_fleet(tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    for number, domain in enumerate(DOMAINS):
        y = np.arange(210) % 7
        z = np.full((210, 5), number, np.float32)
        np.savez(tmp_path / "features" / f"{domain}-{training.PICTURES}.npz", z=z, y=y)
    [*places] = training.places(["pacs"], ["pretrained"], 1)
    assert [place.domain for place in places] == [*DOMAINS]
    cell = training.made(places[1], tmp_path, tmp_path)
    assert cell is not None
    assert cell.about.rows == ("pacs", *("pacs, parts",) * training.IN_PARTS)
    assert set(cell.z[:, 0]) == {1} and set(cell.fleet_z[:, 0]) == {0, 2, 3}
    assert cell.counts.tolist() == [[30] * 7] * 3
    assert (len(cell.labels(0)), len(cell.tests(0))) == (20, 30)
    assert len(np.unique(cell.y[cell.device == 0])) == 7


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--datasets imu", "'imu' is unknown, expected digits"),
        ("--methods local", "'local' is unknown, expected fedavg"),
        ("--datasets digits --methods pretrained", "pretrained is for pacs alone"),
        ("--datasets cifar10", "cifar10.npz"),
    ],
)
def test_wrong_options_are_one_line(
    wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        day_zero.main(["--out", str(tmp_path), "--data", str(tmp_path), *wrong.split()])
    assert words in capsys.readouterr().err
