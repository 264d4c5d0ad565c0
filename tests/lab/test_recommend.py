"""`edge-fl methods recommend`: nearest settings, robust choice, intervals, and the shipped evidence."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from edge_fl.cli import main
from edge_fl.methods import names
from edge_fl_lab import recommend
from edge_fl_lab.recommend import FederationSetting, StudyEvidence

# Four federations of 10 clients with 100 images and four of 40 with 25, one seed each.
NEAR = [FederationSetting(name, "iid", 10, 3, 100.0) for name in "abcd"]
FAR = [FederationSetting(name, "iid", 40, 10, 25.0) for name in "abcd"]
FULL = {
    "local": [80, 80, 80, 80, 60, 60, 60, 60],
    "fedavg+ft": [82, 82, 82, 82, 70, 70, 70, 70],
    "steady": [88, 88, 88, 88, 71, 71, 71, 71],
    "risky": [95, 95, 95, 70, 72, 72, 72, 72],
    "broken": [99, 99, 99, None, 99, 99, 99, 99],
}
HEAD = {
    "pixels": [85, 85, 85, 85, 50, 50, 50, 50],
    "fedavg+ft": [80, 80, 80, 80, 55, 55, 55, 55],
    "steady": [84, 84, 84, 84, 56, 56, 56, 56],
}


def made() -> StudyEvidence:
    def tables(found: dict[str, list[float | None]]) -> dict[str, list[list[float | None]]]:
        return {name: [[value] for value in values] for name, values in found.items()}

    chosen = {name: {"a": "lr 0.1"} for name in FULL}
    return StudyEvidence("abc1234", "2 rounds", [*NEAR, *FAR], tables(FULL), tables(HEAD), chosen)  # type: ignore[arg-type]


def test_the_method_with_the_smallest_worst_loss_is_recommended_not_the_best_mean() -> None:
    found = recommend.recommend(made(), "full", 10, 100)
    assert (found.method, found.best_mean) == ("steady", "risky")
    rows = {row.method: row for row in found.rows}
    assert rows["risky"].accuracy > rows["steady"].accuracy
    assert rows["risky"].worst_loss == 18.0  # 88 - 70 in one of four federations
    assert rows["broken"].diverged == 1
    assert (found.federations, found.evaluated_clients, found.doublings) == (4, 40, 0.0)


@pytest.mark.parametrize(
    ("clients", "samples", "near", "doublings"),
    [(10, 100, NEAR, 0.0), (20, 100, NEAR, 1.0), (40, 20, FAR, 0.32), (20, 50, [*NEAR, *FAR], 2.0)],
)
def test_settings_half_a_doubling_farther_than_the_nearest_one_count(
    clients: int, samples: int, near: list[FederationSetting], doublings: float
) -> None:
    found = recommend.recommend(made(), "full", clients, samples)
    assert (found.settings, found.doublings) == (near, doublings)


def test_sizes_beyond_the_evidence_and_better_references_are_noted() -> None:
    full = recommend.recommend(made(), "full", 1000, 25)
    assert full.notes == ["the evidence has 10 to 40 clients that train; nearest used for 1000"]
    head = recommend.recommend(made(), "head", 10, 100)
    assert head.method == "steady"
    assert head.notes == ["pixels, which needs no federated training, loses less there (0.0 points)"]


def test_differences_are_paired_and_their_interval_is_students() -> None:
    ours, theirs = np.array([80.0, 90, 70, math.nan]), np.array([78.0, 85, 71, 60])
    found = recommend.difference(ours, theirs)
    expected = stats.t.interval(0.95, 2, loc=2.0, scale=stats.sem([2.0, 5, -1]))
    assert found is not None and (found.mean, found.n) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx(expected)
    assert recommend.difference(ours[:1], theirs[:1]) is None


def test_the_shipped_evidence_is_complete_and_small() -> None:
    found = recommend.load()
    assert recommend.FILE.stat().st_size < 100_000
    assert {
        "local",
        "fedavg",
        "fedavg+ft",
        "fedcrc",
        "fedcrl",
        "fedrir",
        "dualfed",
        "repper",
    } <= found.full.keys()
    assert set(found.full) | set(found.head) <= {*names(), "pixels"}
    seeds = [len(row) for row in found.full["local"]]
    assert len(seeds) == len(found.settings)
    for table in (*found.full.values(), *found.head.values()):
        assert [len(row) for row in table] == seeds
        assert all(value is None or 0 <= value <= 100 for row in table for value in row)


@pytest.mark.parametrize("tier", ["full", "head"])
def test_the_command_answers_with_its_evidence(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["methods", "recommend", "--clients", "12", "--samples", "50", "--tier", tier]
    assert main(typed) == 0
    answer = capsys.readouterr().out
    assert main([*typed, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert answer.startswith(f"recommended: {found['method']}\n")
    assert f"{found['federations']} federations" in answer
    assert all(row["to_fine_tuned"] is None or "low" in row["to_fine_tuned"] for row in found["rows"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--clients 0", "Invalid value for '--clients'"),
        ("--samples few", "Invalid value for '--samples'"),
        ("--tier gpu", "'gpu' is not one of 'full', 'head'"),
    ],
)
def test_wrong_values_are_one_line(wrong: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "recommend", "--clients", "12", "--samples", "50", *wrong.split()]) == 4
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
