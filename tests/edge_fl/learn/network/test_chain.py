"""The closed-form gradient equals autograd's for every chain; other networks use autograd."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import factored_gradient, fit, gradient, gradient_and_aux
from edge_fl.learn.network.chain import Chain, layers_of
from edge_fl.learn.network.part import Part
from edge_fl.learn.network.precision import computing_in
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.optimiser import Adam, Optimiser, Product, Sgd, dense
from edge_fl.learn.tree import Parts
from edge_fl.models.cnn import cnn2, tiny
from edge_fl.models.normalise import Normalised

INPUT, CLASSES = InputSpec((2, 16, 16), (0.4,), (0.2,)), 4


def convolutions() -> nn.Module:
    """Every option of a convolution and of pooling that could go astray, groups and a bias left out among them."""
    first = nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False)
    second = nn.Conv2d(6, 4, (3, 2), dilation=(1, 2), groups=2)
    pools = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), nn.MaxPool2d((1, 2))
    return nn.Sequential(first, nn.ReLU(), pools[0], second, pools[1], nn.ReLU(), nn.Flatten())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cnn2": lambda: Normalised(cnn2(INPUT, feature_dim=12), INPUT),
    "no activation": lambda: Normalised(cnn2(INPUT, feature_dim=12, activation=False), INPUT),
    "hidden": lambda: nn.Sequential(nn.Flatten(), nn.Linear(512, 9), nn.ReLU(), nn.Linear(9, 5, bias=False)),
    "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 500)),
    "convolutions": convolutions,
}


class Own(nn.Linear):
    """Somebody's layer that is not what its parent is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class Folded(Chain):
    """A row that does something else as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class Late(Chain):
    """Two layers with a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 8), nn.Linear(8, CLASSES)

    def layers(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        return self.first, torch.tanh, self.second


def network(build: Callable[[], nn.Module]) -> CrossEntropy:
    extractor = Part("extractor", build, 1)
    width = extractor(extractor.init(), torch.zeros(2, *INPUT.shape)).shape[1]
    return CrossEntropy({"extractor": extractor, "head": Part("head", lambda: nn.Linear(width, CLASSES), 2)})


def data(size: int = 7) -> Batches:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (20, *INPUT.shape), generator=drawn, dtype=torch.uint8)
    return Batches.of(x, torch.randint(0, CLASSES, (20,), generator=drawn), classes=CLASSES, batch_size=size)


def batch() -> Batch:
    return next(data().batches("s", 1))


def start(loss: CrossEntropy) -> Parts:
    return {name: part.init() for name, part in loss.parts.items()}


def by_autograd(loss: CrossEntropy) -> Callable[[object, Batch], Tensor]:
    """The same loss without what it knows."""
    return lambda params, batch: loss(params, batch)  # type: ignore[arg-type]


def apart(ours: object, theirs: object) -> float:
    found, expected = tree.leaves(ours), tree.leaves(theirs)
    assert found.keys() == expected.keys()
    return max(float((t - expected[path]).abs().max()) for path, t in found.items())


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_a_chain_knows_the_gradient_that_autograd_finds(build: Callable[[], nn.Module]) -> None:
    loss, b = network(build), batch()
    params = start(loss)
    found = loss.gradient(params, b)
    assert found is not None
    known, z = found
    assert any(isinstance(grad, Product) for grad in known.values())
    assert torch.allclose(z, loss.with_features(params, b)[1], atol=1e-6)
    assert apart(dense(known), gradient(by_autograd(loss), params, b)) < 1e-6
    under = replace(loss, frozen={"head": params["head"]})
    assert (
        apart(gradient(under, params["extractor"], b), gradient(by_autograd(under), params["extractor"], b))
        < 1e-6
    )
    padded = replace(b, mask=torch.tensor([1.0, 1, 0, 1, 1, 0, 1]))
    assert apart(gradient(loss, params, padded), gradient(by_autograd(loss), params, padded)) < 1e-6


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_a_chain_knows_it_for_many_clients_at_once(build: Callable[[], nn.Module]) -> None:
    loss, b = network(build), batch()
    params = start(loss)
    stacked = tree.map(lambda t: torch.stack([t, 0.5 * t]), params)
    x = torch.stack([b.x, b.x.flip(0)])

    def one(params: Parts, x: Tensor) -> Parts:
        return {"found": dense(factored_gradient(loss, params, replace(b, x=x, vectorised=True)))}  # type: ignore[dict-item]

    together = torch.func.vmap(one)(stacked, x)
    halved = tree.map(lambda t: 0.5 * t, params)
    for place, mine in enumerate((params, halved)):
        alone = gradient(by_autograd(loss), mine, replace(b, x=x[place]))
        found = {path: t[place] for path, t in together["found"].items()}
        assert apart(found, alone) < 1e-6


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_further_terms_have_the_gradient_that_autograd_finds(build: Callable[[], nn.Module]) -> None:
    plain, b = network(build), batch()
    params = start(plain)
    reference = tree.map(lambda t: t + 0.1, params)
    near = replace(plain, on_features=lambda z, b: 0.3 * (z * b.y[:, None]).square().mean())
    pulled = replace(near, reference=reference, pull=0.7)
    for loss in (near, pulled):
        assert loss.gradient(params, b) is not None
        assert apart(gradient(loss, params, b), gradient(by_autograd(loss), params, b)) < 1e-5
    assert apart(gradient(near, params, b), gradient(plain, params, b)) > 1e-3
    settings = {"stage": "s", "epochs": 1, "optimiser": Sgd(0.05)}
    ours, theirs = (fit(each, params, data(), **settings) for each in (pulled, by_autograd(pulled)))  # type: ignore[arg-type]
    assert apart(ours, theirs) < 1e-5
    stacked = torch.func.vmap(lambda p: dense(factored_gradient(pulled, p, replace(b, vectorised=True))))  # type: ignore[arg-type, return-value]
    together = stacked(tree.map(lambda t: torch.stack([t, t]), params))
    assert (
        apart({path: t[1] for path, t in together.items()}, gradient(by_autograd(pulled), params, b)) < 1e-5
    )


def test_a_term_on_the_features_of_a_last_part_without_layers_is_left_to_autograd() -> None:
    parts = {"extractor": Part("extractor", NETWORKS["hidden"], 1), "head": Part("head", nn.Identity, 2)}
    loss = CrossEntropy(parts, on_features=lambda z, b: 0.3 * z.square().mean())
    params, b = start(loss), replace(batch(), y=batch().y % 5)
    assert loss.gradient(params, b) is None
    plain = gradient(replace(loss, on_features=None), params, b)
    assert apart(gradient(loss, params, b), plain) > 1e-3, "the term counts"


def test_in_half_precision_it_rounds_where_autocast_rounds() -> None:
    loss, b = network(NETWORKS["cnn2"]), batch()
    params = start(loss)
    exact = gradient(loss, params, b)
    with computing_in("bf16"):
        ours, theirs = gradient(loss, params, b), gradient(by_autograd(loss), params, b)
    assert all(t.dtype == torch.float32 for t in ours.values())
    scale = max(float(t.abs().max()) for t in exact.values())
    assert 1e-4 * scale < apart(exact, ours) and apart(ours, theirs) < 1e-2 * scale


@pytest.mark.parametrize(
    "optimiser",
    [Sgd(0.05), Sgd(0.05, momentum=0.9), Sgd(0.05, 0.01), Sgd(0.05, max_norm=0.1), Adam(0.01)],
    ids=str,
)
def test_every_optimiser_takes_the_same_steps_with_it(optimiser: Optimiser) -> None:
    loss, settings = network(NETWORKS["hidden"]), {"stage": "s", "epochs": 2, "optimiser": optimiser}
    params = start(loss)
    ours, theirs = (fit(each, params, data(), **settings) for each in (loss, by_autograd(loss)))  # type: ignore[arg-type]
    assert apart(ours, theirs) < 1e-5
    assert apart(ours, params) > 1e-3


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, second)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return nn.Sequential(layer)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "normalised": lambda: tiny(INPUT),
    "a row that does more": lambda: nn.Sequential(nn.Linear(4, 4), Folded()),
    "a layer of one's own": lambda: nn.Sequential(Own(4, 4)),
    "a layer twice": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
    "a shared weight": tied,
    "a hook": hooked,
    "dropout": lambda: nn.Sequential(nn.Dropout(), nn.Linear(4, 4)),
    "the batch flattened": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
    "padding by name": lambda: nn.Conv2d(2, 2, 3, padding="same"),
    "circular padding": lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
    "places": lambda: nn.MaxPool2d(2, return_indices=True),
}


@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_what_is_no_chain_is_left_to_autograd(build: Callable[[], nn.Module]) -> None:
    assert layers_of(build()) is None


def test_a_loss_that_does_not_know_its_gradient_leaves_it_to_autograd() -> None:
    normalised = network(lambda: tiny(INPUT))
    assert normalised.gradient(start(normalised), batch()) is None
    hidden = network(NETWORKS["hidden"])
    more = {**start(hidden), "other": {"w": torch.ones(1)}}
    assert hidden.gradient(more, batch()) is None, "a leaf that is not the loss's"
    assert gradient(hidden, more, batch())["other", "w"] == 0
    nothing = network(nn.Flatten)
    under = replace(nothing, frozen={"head": start(nothing)["head"]})
    assert under.gradient({}, batch()) is None and gradient(under, {}, batch()) == {}
    late = CrossEntropy({"extractor": Part("extractor", nn.Flatten, 1), "head": Part("head", Late, 2)})
    assert late.parts["head"].chain and late.gradient(start(late), batch()) is None, "a function on the way"
    assert apart(gradient(late, start(late), batch()), gradient(by_autograd(late), start(late), batch())) == 0


def test_the_gradient_moves_nothing() -> None:
    loss = network(NETWORKS["convolutions"])
    params, b = start(loss), batch()
    before, x = tree.clone(params), b.x.clone()
    loss.gradient(params, b)
    assert tree.same(params, before) and torch.equal(b.x, x)
    gradient_and_aux(lambda p, b: (loss(p, b), ()), params, b)
    assert tree.same(params, before)
