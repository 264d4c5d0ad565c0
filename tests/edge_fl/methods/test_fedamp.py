"""FedAMP: per-client mixtures by attention between models (docs/methods-personal-models.md, "FedAMP")."""

import math
from collections.abc import Callable

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.methods import fedamp
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy

SCALARS = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)


def test_attention_and_mixtures_have_the_worked_out_values() -> None:
    weights = fedamp.attention_by_distance(SCALARS, alpha=1.0, sigma=1.0)
    expected = [
        [0.631997, 0.367879, 0.000123],
        [0.367879, 0.613805, 0.018316],
        [0.000123, 0.018316, 0.981561],
    ]
    assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64), atol=1e-6)
    models = [{"head": {"w": w.float()}} for w in SCALARS]
    mixed = [float(parts["head"]["w"]) for parts in fedamp.mixtures(models, weights)]
    assert mixed == pytest.approx([0.368250, 0.668752, 2.962998], abs=1e-6)


def test_attention_starts_from_alpha_over_sigma_and_fades_with_sigma() -> None:
    weights = fedamp.attention_by_distance(SCALARS[[0, 2]], alpha=2.0, sigma=9.0)
    assert float(weights[0, 1]) == pytest.approx(2 / 9 * math.exp(-1))


@pytest.mark.parametrize(
    "attention",
    [
        lambda: fedamp.attention_by_distance(SCALARS, 1.0, 1.0),
        lambda: fedamp.attention_by_distance(SCALARS, 50.0, 20.0),  # weights for others sum to more than 1
        lambda: fedamp.attention_by_cosine(
            torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).double(), 0.3, 5.0
        ),
        lambda: fedamp.attention_by_cosine(SCALARS[:1], 0.3, 5.0),  # a single client
    ],
)
def test_rows_add_up_to_one_and_nothing_is_negative(attention: Callable[[], torch.Tensor]) -> None:
    weights = attention()
    assert torch.allclose(weights.sum(1), torch.ones(len(weights), dtype=torch.float64), atol=1e-12)
    assert (weights >= 0).all()


def test_the_heuristic_keeps_its_own_weight_and_prefers_the_like_minded() -> None:
    models = torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.2]], dtype=torch.float64)
    weights = fedamp.attention_by_cosine(models, own=0.4, scale=3.0)
    assert torch.allclose(weights.diag(), torch.full((3,), 0.4, dtype=torch.float64))
    assert weights[0, 1] > weights[0, 2]


def test_the_heuristic_shares_the_rest_in_proportion_to_the_exponential_of_the_cosine() -> None:
    models = torch.tensor([[2.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)  # cosines 0.6, 0 and 0.8
    weights = fedamp.attention_by_cosine(models, own=0.4, scale=3.0)
    assert float(weights[0, 1] / weights[0, 2]) == pytest.approx(math.exp(3 * 0.6))
    assert float(weights[1, 2] / weights[1, 0]) == pytest.approx(math.exp(3 * 0.2))
    assert float(weights[2, 0] + weights[2, 1]) == pytest.approx(0.6)


def test_equal_models_mix_to_themselves() -> None:
    model = toy.net().extractor.init()
    weights = fedamp.attention_by_distance(torch.zeros(3, 1, dtype=torch.float64), 1e4, 1e6)
    for mixed in fedamp.mixtures([{"extractor": model}] * 3, weights):
        assert tree.same(mixed, {"extractor": model})


def test_the_distance_is_over_parameters_whatever_their_order() -> None:
    model = {"extractor": toy.net().extractor.init()}
    turned = {"extractor": dict(reversed(model["extractor"].items()))}
    assert fedamp.vectors([model]).equal(fedamp.vectors([turned]))
    assert fedamp.vectors([model]).shape[1] == sum(t.numel() for t in tree.parameters(model).values())


@pytest.mark.parametrize("variant", ["fedamp", "heur"])
def test_every_client_gets_its_own_mixture_and_who_was_absent_keeps_its_last(variant: str) -> None:
    run = toy.federate(
        toy.method("fedamp", variant=variant, sigma=1.0, alpha=0.5),
        rounds=3,
        cohort=lambda number: ["c0", "c1", "c4"] if number == 1 else ["c0", "c4"],
    )
    assert not tree.same(run.downs[1]["c0"], run.downs[1]["c4"])
    late, fresh = (steps.broadcast(run.method, run.shared, id) for id in ("c1", "c2"))
    assert tree.same(late, steps.broadcast(run.method, run.history[1], "c1"))
    assert tree.same(fresh, {name: run.history[0][name] for name in ("extractor", "head")})


def test_running_statistics_are_mixed_with_the_same_weights() -> None:
    method = toy.method("fedamp", sigma=1.0, alpha=0.2, distances="absolute")
    run = toy.federate(method, rounds=1)
    models = [update.parts for update in run.updates[0].values()]
    weights = fedamp.attention_by_distance(fedamp.vectors(models), 0.2, 1.0)[0]
    name = "buffer:extractor.convolutions.1.running_var"
    expected = sum(w * m["extractor"][name].double() for w, m in zip(weights, models, strict=True))
    assert torch.allclose(
        steps.broadcast(method, run.shared, "c0")["extractor"][name], expected.float(), atol=1e-7
    )


def test_a_client_continues_from_its_own_model_pulled_towards_the_mixture() -> None:
    near, far = (toy.federate(toy.method("fedamp", alpha=1.0, lam=lam), rounds=2) for lam in (10.0, 0.0))

    def gap(run: toy.Federation) -> float:
        mine, mixture = run.own["c0"]["personal_head"]["weight"], run.downs[1]["c0"]["head"]["weight"]
        return float((mine - mixture).norm())

    assert gap(near) < gap(far)
    assert tree.same(tree.unprefixed("personal_", near.own["c0"]), near.updates[1]["c0"].parts)


def test_by_default_the_distances_of_the_round_are_the_unit() -> None:
    """Whatever the size of the network, the pull does not vanish; absolute values of the paper switch it off here."""
    assert fedamp.median_distance(SCALARS) == pytest.approx(4)
    assert fedamp.median_distance(SCALARS[:1]) == fedamp.median_distance(torch.zeros(3, 2)) == 0
    method = toy.method("fedamp", alpha=0.2, sigma=0.5)
    run = toy.federate(method, rounds=1)
    models = fedamp.vectors([update.parts for update in run.updates[0].values()])
    unit = fedamp.median_distance(models)
    weights = fedamp.attention_by_distance(models, 0.2 * unit, 0.5 * unit)[0].float()
    heads = torch.stack([update.parts["head"]["bias"] for update in run.updates[0].values()])
    assert torch.allclose(run.method.broadcast(run.shared, "c0")["head"]["bias"], weights @ heads, atol=1e-6)
    far = fedamp.attention_by_distance(models, 1e4, 1e6)
    assert float(far.diag().min()) > 0.95 > float(weights[0]) > 0.05
    alone = toy.federate(method, rounds=2, cohort=lambda number: ["c0"])
    assert tree.same(alone.method.broadcast(alone.shared, "c0"), alone.updates[1]["c0"].parts)
