"""The round gate: what honest rounds cost and keep, what a harmful update cannot do, and what liars cannot do."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_fl import metrics
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import clone, same, size_bytes
from edge_fl.methods.contract import steps
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate.execution import simulated_clients
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, with_settings
from edge_fl_server.training import gate, rounds, studies
from edge_fl_server.training.clients import WrappedClients
from edge_fl_server.training.gate import Evidence, RoundComparison, fall
from edge_fl_server.training.records import MOST_DROPPED
from edge_fl_server.training.rounds import Plan

CLIENTS, LEARNT = 10, 4


class Attacked(WrappedClients):
    """Clients of which `attackers` send noise as large as a model from round LEARNT on, and `liars` answer comparisons with `lie`."""

    def __init__(self, fleet, attackers=(), liars: Mapping[str, str] = {}):
        super().__init__(fleet)
        self._attackers, self._liars = attackers, liars
        self.asked: list[list[str]] = []

    def each(self, step, round, method, downs):
        if step == "compare":
            self.asked.append(list(downs))
        for update in self._clients.each(step, round, method, downs):
            if step == "train" and round >= LEARNT and update.client in self._attackers:
                yield noisy(update)
            elif step == "compare" and update.client in self._liars:
                images = update.metrics[metrics.VALIDATION_SAMPLES]
                counts = {
                    metrics.VALIDATION_LOST: 0,
                    metrics.VALIDATION_GAINED: 0,
                    self._liars[update.client]: images,
                }
                yield replace(update, metrics={metrics.VALIDATION_SAMPLES: images, **counts})
            else:
                yield update


def noisy(update: Update) -> Update:
    drawn = torch.Generator().manual_seed(1)
    parts = {
        part: {
            name: t + 3 * torch.randn(t.shape, generator=drawn) if t.is_floating_point() and t.ndim > 1 else t
            for name, t in params.items()
        }
        for part, params in update.parts.items()
    }
    return replace(update, parts=parts)


def fleet_of(*settings: str, method: str = "fedavg"):
    fixed = ("engine=sequential", "device=cpu", f"data.clients={CLIENTS}", "data.beta=1", "evaluate_every=0")
    recipe = with_settings(Recipe(), (*fixed, f"method.name={method}", *settings))
    setup = execution.of_study(studies.prepare(recipe))
    return setup.method, simulated_clients(setup), Plan.of(recipe, setup.method)


def results(rounds_: int, attackers=(), liars: Mapping[str, str] = {}, panel=0.2, method="fedavg", **plan):
    the_method, fleet, of_recipe = fleet_of(f"validation.panel={panel}", f"rounds={rounds_}", method=method)
    attacked = Attacked(fleet, attackers, liars)
    found = list(rounds.run(the_method, attacked, replace(of_recipe, **plan)))
    return the_method, attacked, found


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedpac", "fedcrc", "ditto", "fedamp"])
def test_an_honest_round_is_exactly_as_without_the_gate(method):
    _, _, gated = results(2, panel=0.3, method=method)
    _, _, plain = results(2, panel=0, method=method)
    assert [result.verdict.outcome for result in gated] == ["accepted"] * 2
    assert [result.verdict for result in plain] == [None] * 2
    assert same(gated[-1].shared, plain[-1].shared)


def test_simulations_are_not_compared_unless_the_recipe_says_so_and_devices_are():
    method = fleet_of()[0]
    devices = Plan.of(with_settings(Recipe(), ["source=fleet"]), method)
    assert Plan.of(Recipe(), method).panel == 0
    assert (devices.panel, devices.panel_from) == (gate.PANEL, 8)


def test_a_panel_is_a_fifth_of_a_round_and_its_clients_take_part_in_the_next_one():
    """So their candidate is a download that is only moved forward (tests/mixed/test_round_gate.py measures it on devices)."""
    half = CohortConfig(participation=0.5)
    _, fleet, found = results(3, panel=gate.PANEL, cohort=half)
    assert [result.verdict.comparisons for result in found] == [gate.SMALLEST_PANEL] * 3
    for asked, following in zip(fleet.asked, found[1:], strict=False):
        assert set(asked) < set(following.selected)
    for result in found:
        model = (result.bytes_down - result.verdict.bytes_down) / len(result.selected)
        assert result.verdict.bytes_down == gate.SMALLEST_PANEL * model


def test_who_makes_a_round_worse_is_left_out_and_named():
    method, _, found = results(LEARNT, attackers=["c003"])
    verdict = found[-1].verdict
    assert (verdict.outcome, verdict.without, list(verdict.named)) == ("repaired", ("c003",), ["c003"])
    assert verdict.named["c003"] >= 1
    assert verdict.change < -verdict.margin
    assert "without c003" in str(verdict)
    # exactly the round of the others
    others = Attacked(fleet_of("rounds=3")[1])
    before = found[-2].shared
    *_, third = rounds.run(method, others, Plan(LEARNT - 1, evaluate_every=0))
    assert same(third.shared, before)
    downs = {client: steps.broadcast(method, before, client) for client in others.ids()}
    honest = [
        update for update in others.each("train", LEARNT, method.at(LEARNT), downs) if update.client != "c003"
    ]
    assert same(found[-1].shared, steps.aggregate(method, before, honest))


def test_two_who_send_the_same_are_both_named_and_nobody_else():
    verdict = results(LEARNT, attackers=["c003", "c007"])[2][-1].verdict
    assert (verdict.outcome, sorted(verdict.named)) == ("repaired", ["c003", "c007"])


def test_rounds_that_nothing_repairs_are_dropped_and_never_for_ever():
    everyone = [f"c{number:03}" for number in range(CLIENTS)]
    _, _, found = results(LEARNT + MOST_DROPPED, attackers=everyone)
    outcomes = [result.verdict.outcome for result in found[LEARNT - 1 :]]
    assert outcomes == ["dropped"] * MOST_DROPPED + ["forced"]
    assert same(found[LEARNT - 2].shared, found[-2].shared)
    assert found[-2].verdict.named == {}


def test_dropped_rounds_count_also_after_a_resume():
    everyone = [f"c{number:03}" for number in range(CLIENTS)]
    method, fleet, found = results(LEARNT + 1, attackers=everyone)
    assert [result.verdict.outcome for result in found[-2:]] == ["dropped", "dropped"]
    plan = Plan(LEARNT + 3, panel=0.2)
    shared = found[-1].shared
    after = list(rounds.run(method, fleet, plan, shared, LEARNT + 2, dropped=2))
    assert [result.verdict.outcome for result in after] == ["dropped", "forced"]


@pytest.mark.parametrize("panel", [0.1, 1.0])
def test_a_liar_drops_no_honest_round_and_saves_no_bad_one(panel):
    for liar in (f"c{number:03}" for number in range(0, CLIENTS, 3)):
        honest = results(2, liars={liar: metrics.VALIDATION_LOST}, panel=panel)[2]
        assert {result.verdict.outcome for result in honest} == {"accepted"}
    bad = results(LEARNT, attackers=["c003"], liars={"c003": metrics.VALIDATION_GAINED}, panel=panel)[2]
    assert bad[-1].verdict.outcome == "repaired"


def comparisons(*changes: float, images: int = 10, of: int = 0) -> Evidence:
    found = {
        f"c{place}": RoundComparison(images, round(max(-c, 0) * images), round(max(c, 0) * images))
        for place, c in enumerate(changes)
    }
    return Evidence(found, of or len(found))


@pytest.mark.parametrize(
    ("changes", "worse"),
    [
        ((-1.0,), False),  # one client never drops a round
        ((-1.0, -0.4), False),
        ((-0.5, -0.5), True),
        ((-1.0, 0.0, 0.0), False),  # one of three
        ((-1.0, -1.0, 0.2), True),
        ((-1.0,) * 2 + (0.0,) * 8, False),  # a fifth of liars
        ((1.0,) * 2 + (-0.4,) * 8, True),
        ((-0.11,) * 10, True),
        ((0.0,) * 10, False),
    ],
)
def test_a_round_is_worse_only_if_enough_clients_lost(changes, worse):
    assert comparisons(*changes, images=100).worse(0.1) is worse


def test_few_images_show_only_large_harm():
    assert not comparisons(*[-0.2, 0.0, 0.2, -0.4, -0.2, 0.0, -0.2, -0.2], images=5).worse(0.1)
    assert comparisons(*[-0.6, -0.4, -0.8, -0.6, 0.0, -0.4, -0.6, -0.4], images=5).worse(0.1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ((-0.5, -0.4, -0.6, -0.1, -0.7, 0.0, -0.5, -0.3), True),
        (
            (0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -0.6, -1.0),
            False,
        ),  # an honest client whose class conflicts with two others'
    ],
)
def test_one_or_two_clients_that_lose_much_name_nobody(changes, named):
    harm, error = fall(comparisons(*[0.0] * len(changes)), comparisons(*changes))
    assert harm >= gate.NAMED
    assert (harm > gate.Z * error) is named


def test_clients_drawn_from_many_clients_count_less_than_all_clients():
    changes = [-0.6, -0.5, 0.2, 0.1, -0.6, 0.2, -0.4, 0.1]
    assert comparisons(*changes, images=1000, of=8).worse(0.1)
    assert not comparisons(*changes, images=1000, of=1000).worse(0.1)


def test_honest_clients_without_harm_rarely_drop_a_round():
    """10,000 panels of 8 clients with 10 images, of which each changes with probability 0.3, in either direction."""
    drawn = np.random.default_rng(0)
    lost, gained = (drawn.binomial(10, 0.15, (10_000, 8)) for _ in range(2))
    dropped = 0
    for ls, gs in zip(lost, gained, strict=True):
        found = {
            str(i): RoundComparison(20, int(a), int(b)) for i, (a, b) in enumerate(zip(ls, gs, strict=True))
        }
        dropped += Evidence(found, 8).worse(0.1)
    assert dropped <= 20


def test_a_client_that_makes_up_counts_is_not_heard():
    method, fleet, plan = fleet_of("validation.panel=1", "rounds=1")

    class Inventing(WrappedClients):
        def each(self, step, round, method, downs):
            for update in super().each(step, round, method, downs):
                if step == "compare" and update.client == "c000":
                    update.metrics[metrics.VALIDATION_LOST] = 1e9
                yield update

    (result,) = rounds.run(method, Inventing(fleet), plan)
    assert result.verdict.clients == CLIENTS - 1


def test_a_method_without_a_model_before_its_end_is_not_compared():
    assert [result.verdict for result in results(1, method="repper")[2]] == [None]


def test_a_comparison_leaves_everything_as_it_was():
    method, fleet, plan = fleet_of("rounds=1", method="fedrep")
    (result,) = rounds.run(method, fleet, plan)
    start = steps.start(method)
    before = dict(fleet.personal_state())
    downs = {
        client: steps.paired(*(steps.broadcast(method, parts, client) for parts in (start, result.shared)))
        for client in fleet.ids()
    }
    found = list(fleet.each("compare", 1, method, downs))
    assert all(same(parts, before[client]) for client, parts in fleet.personal_state())
    assert {size_bytes(update.parts) for update in found} == {0}
    for update in found:
        counts = update.metrics
        assert counts.keys() == {
            metrics.VALIDATION_SAMPLES,
            metrics.VALIDATION_LOST,
            metrics.VALIDATION_GAINED,
        }


def test_a_server_that_ends_while_clients_compare_goes_on_without_change_of_a_figure():
    class Ending(WrappedClients):
        def each(self, step, round, method, downs):
            if step == "compare" and round == 2:
                raise KeyboardInterrupt
            return super().each(step, round, method, downs)

    method, fleet, plan = fleet_of("validation.panel=0.2", "rounds=2", "evaluate_every=1", method="fedrep")
    _, undisturbed = rounds.run(method, fleet, plan)
    fleet = fleet_of("rounds=2", method="fedrep")[1]
    running = rounds.run(method, Ending(fleet), plan)
    first = next(running)
    saved = [(client, clone(own)) for client, own in fleet.personal_state()]
    with pytest.raises(KeyboardInterrupt):
        next(running)
    resumed = fleet_of("rounds=2", method="fedrep")[1]
    resumed.restore(iter(saved))
    (after,) = rounds.run(method, resumed, plan, first.shared, first=2)
    assert same(after.shared, undisturbed.shared)
    assert (after.verdict, after.metrics) == (undisturbed.verdict, undisturbed.metrics)
