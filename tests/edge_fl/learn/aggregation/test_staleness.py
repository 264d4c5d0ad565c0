"""A late update counts as its change times 1/sqrt(1 + τ)."""

import pytest
import torch

from edge_fl.learn.aggregation import staleness
from edge_fl.learn.aggregation.mean import Update, weighted_mean
from edge_fl.learn.tree import same


def part(*values: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"extractor": {"w": torch.tensor(values), "steps": torch.tensor(int(values[0]))}}


def test_a_late_change_is_moved_to_the_newest_parts_and_weighs_less():
    update = Update("c", 5, part(3.0, 1.0), start=part(1.0, 1.0), staleness=3)
    moved = staleness.moved(update, part(10.0, 20.0))
    assert moved.parts["extractor"]["w"].tolist() == [11.0, 20.0]  # 10 + (3 - 1) / sqrt(4), 20 + 0
    assert moved.parts["extractor"]["steps"] == 3  # a count is no change
    assert (moved.samples, moved.staleness, moved.start) == (5, 3, None)


def test_an_update_of_this_round_stays_as_it_is():
    update = Update("c", 5, part(3.0, 1.0))
    assert staleness.moved(update, part(10.0, 20.0)) is update


def test_the_mean_of_a_buffer_is_that_of_fedbuff():
    """w + (1/K) Σ s(τ_i) Δ_i, Algorithm 1 of FedBuff with a server's step of 1."""
    w, starts = part(4.0, -2.0), {"a": part(1.0, 0.0), "b": part(4.0, -2.0)}
    sent = {"a": part(2.0, 2.0), "b": part(5.0, -1.0)}
    updates = [
        Update("a", 1, sent["a"], start=starts["a"], staleness=1),
        Update("b", 1, sent["b"]),
    ]
    found = weighted_mean(w, [staleness.moved(update, w) for update in updates])
    s = 2**-0.5
    assert found["extractor"]["w"].tolist() == pytest.approx([4 + (s * 1 + 1) / 2, -2 + (s * 2 + 1) / 2])


def test_what_the_server_did_not_send_is_no_change():
    statistics = {"extractor.export_norm": {"mean": torch.ones(2)}}
    update = Update("c", 5, statistics, start=part(1.0, 1.0), staleness=2)
    assert same(staleness.moved(update, part(2.0, 2.0)).parts, statistics)
