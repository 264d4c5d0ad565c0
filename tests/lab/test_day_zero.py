"""`edge-fl methods recommend --tier head --own-labels`: choice, interpolation, notes, and the shipped figures."""

import json
import math

import pytest

from edge_fl.cli import main
from edge_fl_lab import day_zero
from edge_fl_lab.day_zero import DayZero, DayZeroRow


def rows(dataset: str, method: str, served: list[float], own: float = 50.0) -> list[DayZeroRow]:
    """With 0, 1 and 15 labels."""
    return [
        DayZeroRow(dataset, method, labels, 60, own if labels else 0.0, 70.0, value)
        for labels, value in zip((0.0, 1.0, 15.0), served, strict=True)
    ]


STUDY = DayZero(
    "abc1234",
    4,
    (150, 600),
    [
        *rows("digits", "steady", [70, 80, 88]),
        *rows("digits", "risky", [70, 90, 99]),
        *rows("fashion", "steady", [70, 80, 88]),
        *rows("fashion", "risky", [70, 81, 70]),
        *rows("pacs", "pretrained", [90, 91, 92]),
    ],
)


def test_the_method_with_the_smallest_worst_loss_is_recommended_for_these_labels() -> None:
    few, many = (day_zero.recommend(STUDY, labels, 4, 300) for labels in (1, 15))
    assert (few.method, many.method) == ("risky", "steady")
    assert [(row.method, row.worst_loss) for row in many.rows] == [("steady", 11.0), ("risky", 18.0)]
    assert few.rows[0].served == pytest.approx((90 + 81) / 2)
    assert (few.devices, few.notes, few.commit) == (300, [], "abc1234")


def test_a_frozen_backbone_is_shown_and_not_compared() -> None:
    found = day_zero.recommend(STUDY, 15, 4, 300)
    assert "pretrained" not in {row.method for row in found.rows}
    assert found.frozen is not None and (found.frozen.served, found.frozen.worst_loss) == (92.0, 0.0)


@pytest.mark.parametrize(
    ("labels", "served", "own"), [(0, 70.0, 0.0), (1, 80.0, 50.0), (3, 80 + 8 / 3, 50.0), (99, 88.0, 50.0)]
)
def test_between_measured_numbers_of_labels_figures_are_interpolated(
    labels: int, served: float, own: float
) -> None:
    [digits, _] = day_zero.expected(STUDY, "steady", labels)
    assert (digits.served, digits.own) == (pytest.approx(served), own)


def test_what_was_not_measured_is_noted() -> None:
    assert day_zero.recommend(STUDY, 15, 4, 150).notes == []
    assert day_zero.recommend(STUDY, 15, 12, 600).notes == [
        "measured with 4 full devices of 150 to 600 images each, not with 12 of 600"
    ]
    assert day_zero.recommend(STUDY, 16, 4, 150).notes == [
        "measured with up to 15 labels; their figures are used for 16"
    ]


def test_the_text_says_what_to_expect() -> None:
    lines = day_zero.text(day_zero.recommend(STUDY, 1, 4, 300)).splitlines()
    assert lines[:5] == [
        "recommended: risky",
        "with 1 label per device: expect about 85.5 % with the served head (own alone 50.0 %, fleet's head 70.0 %), with this method",
        "by data set (own alone, fleet's head): digits 90.0 % (50.0 %, 70.0 %); fashion 81.0 % (50.0 %, 70.0 %)",
        "why: smallest loss against the best method in its worst data set, with the served head",
        "without training, on a frozen backbone: about 91.0 % with the served head (own alone 50.0 %, fleet's head 70.0 %);"
        " pacs 91.0 % (50.0 %, 70.0 %)",
    ]


def test_the_shipped_figures_are_complete_and_small() -> None:
    found = day_zero.load()
    assert day_zero.FILE.stat().st_size < 100_000
    places = {(row.dataset, row.method) for row in found.rows}
    trained = {
        (d, m)
        for d in ("digits", "fashion-mnist", "cifar10")
        for m in ("fedavg", "fedrep", "fedcrc", "repper")
    }
    assert places == {*trained, ("pacs", "pretrained"), ("pacs, parts", "pretrained")}
    assert len(found.rows) == 6 * len(places)
    for row in found.rows:
        assert 0 <= min(row.own, row.fleet, row.served) <= max(row.own, row.fleet, row.served) <= 100
        assert row.devices >= 12 and math.isfinite(row.labels)
        assert row.labels or (row.own == 0 and row.served > 30)  # own alone needs labels, the others do not


TYPED = ["methods", "recommend", "--clients", "4", "--samples", "300", "--tier", "head"]


@pytest.mark.parametrize("labels", ["0", "10"])
def test_the_command_answers_with_what_to_expect(labels: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TYPED, "--own-labels", labels]) == 0
    answer = capsys.readouterr().out
    assert main([*TYPED, "--own-labels", labels, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert answer.startswith(
        f"recommended: {found['method']}\nwith {labels} labels per device: expect about "
    )
    assert found["rows"][0]["method"] == found["method"]
    assert (found["rows"][0]["own"] == 0) == (labels == "0")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--own-labels -1", "Invalid value for '--own-labels'"),
        ("--own-labels 3 --tier full", "--own-labels 3 with --tier full: expected --tier head"),
    ],
)
def test_wrong_labels_are_one_line(wrong: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TYPED, *wrong.split()]) == 4
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
