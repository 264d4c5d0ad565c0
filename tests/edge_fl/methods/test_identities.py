"""Pairs of methods that must be bit-identical with equal seeds and cohorts (docs/methods-formulas.md, "Numbers that tests check")."""

from functools import partial
from typing import Any

import pytest

from edge_fl.learn import tree
from edge_fl.learn.network.part import Net
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy

ROUNDS = 3
WHOLE = ("extractor", "head")


pytestmark = pytest.mark.usefixtures("one_thread")


def ran(name: str, on: Net | None = None, rounds: int = ROUNDS, **options: Any) -> toy.Federation:
    """A federation of two epochs a round, all clients in the first round, then some."""
    method = toy.method(name, on, epochs=2, **options)
    cohorts = {1: list(toy.clients()), 2: ["c0", "c2", "c4"], 3: ["c0", "c1", "c3"]}
    return toy.federate(method, rounds, cohort=cohorts.__getitem__)


def path(run: toy.Federation) -> list[Parts]:
    """The shared model after every round."""
    return [{name: shared[name] for name in WHOLE} for shared in run.history]


def models(run: toy.Federation, prefix: str = "") -> dict[str, Parts]:
    """The personal model of every client at the end."""
    return {id: {name: own[prefix + name] for name in WHOLE} for id, own in run.own.items()}


fedavg, local = partial(ran, "fedavg"), partial(ran, "local")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {"mu": 0.0}),
        ("moon", {"mu": 0.0, "moon_proj": 0}),
        ("ditto", {"lam": 0.0}),
        ("ditto", {"lam": 1.0}),
        ("ditto", {"lam": 2.0, "personal_epochs": 1}),
        ("fedper", {"personal_layers": 0}),
        ("fedavg+ft", {}),
        ("fedprox+ft", {"mu": 0.0}),
    ],
)
def test_these_take_fedavgs_path(name: str, options: dict[str, Any]) -> None:
    assert tree.same(dict(enumerate(path(ran(name, **options)))), dict(enumerate(path(fedavg()))))


@pytest.mark.parametrize("weighting", ["n", "uniform"])
def test_fedbn_without_batchnorm_is_fedavg(weighting: str) -> None:
    net = toy.net(norm=False)
    found, expected = ran("fedbn", net, weighting=weighting), fedavg(net)
    if weighting == "n":
        assert tree.same(dict(enumerate(path(found))), dict(enumerate(path(expected))))
    else:  # clients of equal size weigh equally in both
        same_size = {id: toy.clients()["c0"] for id in ("c0", "c1")}
        uniform, weighted = (
            toy.federate(toy.method(name, net), 2, cohort=lambda _: same_size, data=same_size)
            for name in ("fedbn", "fedavg")
        )
        assert tree.same(uniform.shared, weighted.shared)


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("ditto", {"lam": 0.0}, "personal_"),
        ("fedamp", {"lam": 0.0}, "personal_"),
        ("fedamp", {"lam": 0.0, "variant": "heur"}, "personal_"),
        ("fedper", {"personal_layers": 99}, ""),
    ],
)
def test_these_are_local(name: str, options: dict[str, Any], prefix: str) -> None:
    assert tree.same(models(ran(name, **options), prefix), models(local()))


def test_but_for_their_terms_they_would_not_be() -> None:
    """The identities above could not fail if the terms did nothing at all."""
    assert not tree.same(ran("fedprox", mu=0.5).shared, fedavg().shared)
    assert not tree.same(path(ran("moon", moon_proj=0))[-1], fedavg().shared)
    assert not tree.same(models(ran("ditto", lam=0.5), "personal_"), models(local()))
    assert not tree.same(models(ran("fedamp", alpha=1.0, sigma=1.0), "personal_"), models(local()))
    assert not tree.same(
        models(ran("fedper", personal_layers=99)),
        models(ran("fedper", personal_layers=99, optimiser=toy.Sgd(0.04))),
    )


def test_fine_tuning_without_epochs_is_fedavg() -> None:
    tuned, plain = ran("fedavg+ft", ft_epochs=0), fedavg()
    for id in plain.clients:
        down = steps.broadcast(tuned.method, tuned.shared, id)
        _, tuned.own[id] = steps.personalise(tuned.method, down, tuned.own[id], toy.batches(id, ROUNDS))
        assert tuned.predict(id).equal(plain.predict(id))


def test_pfedme_with_beta_zero_has_a_constant_model() -> None:
    run = ran("pfedme", beta=0.0)
    start = tree.leaves(run.history[0])
    for shared in run.history[1:]:
        assert all(t.equal(start[p]) for p, t in tree.leaves(shared).items() if t.is_floating_point())


def test_fedcrc_with_tau_one_has_a_constant_global_head() -> None:
    run = ran("fedcrc", tau=1.0)
    assert all(tree.same(shared["global_head"], run.history[0]["global_head"]) for shared in run.history)


@pytest.mark.parametrize("name", ["fedbabu", "spherefed", "fedetf"])
def test_these_heads_never_move(name: str) -> None:
    run = ran(name)
    constant = {part: params for part, params in run.history[0].items() if not moved(run, part)}
    assert constant, "every shared part moved"
    assert moved(run, "extractor")
    assert not any(
        part in update.parts for part in constant for round in run.updates for update in round.values()
    )


def moved(run: toy.Federation, part: str) -> bool:
    return any(not tree.same(shared[part], run.history[0][part]) for shared in run.history)
