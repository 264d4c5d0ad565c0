"""pFedFDA: heads from adapted Gaussians (docs/methods-personal-heads.md, "pFedFDA")."""

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Params
from edge_fl.methods.contract import steps
from edge_fl.methods.pfedfda import discriminant, frequencies
from tests.edge_fl.methods import toy


def blobs(number: int, centres: torch.Tensor, spread: float = 0.5, seed: int = 1) -> Batches:
    """Gaussian features around the centre of their class, in random order."""
    made = torch.Generator().manual_seed(seed)
    y = torch.randint(len(centres), (number,), generator=made)
    return Batches.of(centres[y] + spread * torch.randn(number, 12, generator=made), y, classes=10)


def test_the_head_is_that_of_linear_discriminant_analysis() -> None:
    data = blobs(400, torch.randn(10, 12, generator=torch.Generator().manual_seed(2)))
    z, y = data.x.double(), data.y
    mean = torch.stack([z[y == c].mean(0) for c in range(10)])
    centred = z - mean[y]
    gaussians = {"mean": mean, "covariance": centred.T @ centred / len(z)}
    head = discriminant(gaussians, data.counts.double() / len(z))
    expected = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-4).fit(z.numpy(), y.numpy())
    logits = z @ head["weight"].T + head["bias"]
    assert torch.allclose(logits.softmax(1), torch.from_numpy(expected.predict_proba(z.numpy())), atol=1e-3)


def test_a_round_equals_a_plain_loop() -> None:
    method = toy.method("pfedfda", epochs=2, optimiser=Sgd(0.05), iterations=0)
    shared, data = steps.start(method), toy.batches()
    down, own = steps.broadcast(method, shared, "c0"), steps.start_own(method, "c0")
    extractor = toy.module_of(method.net.extractor, down["extractor"])
    mean, covariance = down["gaussians"]["mean"].double(), torch.eye(12).double()
    prior = torch.tensor([int((data.y == c).sum()) / len(data) + 1e-4 for c in range(10)]).double()
    prior = prior / prior.sum()

    def head(mean: torch.Tensor, covariance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shrunk = 0.9999 * covariance + 1e-4 * torch.trace(covariance) / 12 * torch.eye(12)
        weight = mean @ torch.linalg.inv(shrunk)
        return weight.float(), (-0.5 * torch.diag(mean @ weight.T) + torch.log(prior)).float()

    weight, bias = head(mean, covariance)
    optimiser = torch.optim.SGD(extractor.parameters(), lr=0.05)
    for batch in data.batches("train", 2, norm=True):
        optimiser.zero_grad()
        F.cross_entropy(extractor(batch.x) @ weight.T + bias, batch.y).backward()
        optimiser.step()
    with torch.no_grad():
        z = extractor.eval()(data.x.float() / 255).double()
    own_mean = torch.stack(
        [z[data.y == c].mean(0) if int((data.y == c).sum()) > 2 else mean[c] for c in range(10)]
    )
    scatter = sum(torch.outer(z[i] - own_mean[data.y[i]], z[i] - own_mean[data.y[i]]) for i in range(len(z)))
    own_covariance = scatter / (len(z) - 1) + torch.eye(12)
    adapted = 0.5 * own_mean + 0.5 * mean, 0.5 * own_covariance + 0.5 * covariance

    up, new = method.local_update(down, own, data)
    assert toy.same_as(up["extractor"], extractor)
    for key, expected in zip(("mean", "covariance"), adapted, strict=True):
        assert torch.allclose(up["gaussians"][key].double(), expected, atol=1e-4)
    assert torch.allclose(new["head"]["weight"], head(*adapted)[0], atol=1e-3)
    assert torch.allclose(new["head"]["bias"], head(*adapted)[1], atol=1e-2)


def test_a_class_with_at_most_two_samples_takes_the_global_mean() -> None:
    method = toy.method("pfedfda")
    y = torch.tensor([0, 0, 1, 1, 1, 2])
    z = torch.randn(6, 12, generator=torch.Generator().manual_seed(3)).double()
    known = {"mean": torch.full((10, 12), 7.0), "covariance": torch.eye(12)}
    mean = method._estimate(z, y, known)["mean"]  # type: ignore[attr-defined]
    assert torch.allclose(mean[1], z[2:5].mean(0))
    assert (mean[[0, *range(2, 10)]] == 7.0).all()


def error(method: object, data: Batches, known: Params, beta: tuple[float, float]) -> float:
    """The cross-validation error, by hand: the samples of each class alternate between two folds."""
    seen, fold = [0] * 10, []
    for label in data.y.tolist():
        fold.append(seen[label] % 2)
        seen[label] += 1
    folds, total = torch.tensor(fold), 0.0
    for k in (0, 1):
        x, y = data.x[folds != k].double(), data.y[folds != k]
        found = method._estimate(x, y, known)  # type: ignore[attr-defined]
        both = zip(beta, found, strict=True)
        head = discriminant(
            {n: b * found[n] + (1 - b) * known[n] for b, n in both}, frequencies(data).double()
        )
        logits = data.x[folds == k].double() @ head["weight"].T + head["bias"]
        total += float(F.cross_entropy(logits, data.y[folds == k]))
    return total


@pytest.mark.parametrize("single", [False, True])
def test_beta_minimises_the_cross_validation_error(single: bool) -> None:
    method = toy.method("pfedfda", single_beta=single, iterations=50)
    centres = torch.randn(10, 12, generator=torch.Generator().manual_seed(2))
    moved = centres + 0.4 * torch.randn(10, 12, generator=torch.Generator().manual_seed(7))
    known = {"mean": moved.double(), "covariance": 0.3 * torch.eye(12).double()}
    data = blobs(60, centres, 0.8)
    found = tuple(method._beta(data, known, frequencies(data).double()).tolist())  # type: ignore[attr-defined]
    grid = [i / 20 for i in range(21)]
    pairs = [(b, b) for b in grid] if single else [(a, b) for a in grid for b in grid]
    assert error(method, data, known, found) <= min(error(method, data, known, pair) for pair in pairs) + 1e-3
    assert all(0 <= b <= 1 for b in found) and (found[0] == found[1]) == single


def test_much_data_is_trusted_and_foreign_data_is_not() -> None:
    method = toy.method("pfedfda", iterations=50)
    centres = torch.randn(10, 12, generator=torch.Generator().manual_seed(2))
    wrong = {"mean": torch.zeros(10, 12).double(), "covariance": torch.eye(12).double()}
    data = blobs(800, centres, 1.0)
    assert method._beta(data, wrong, frequencies(data).double())[0] > 0.9  # type: ignore[attr-defined]
    lone = Batches.of(torch.randn(1, 12), torch.tensor([3]), classes=10)
    assert method._beta(lone, wrong, frequencies(lone).double()).tolist() == [0, 0]  # type: ignore[attr-defined]


def test_the_server_averages_gaussians_by_samples_and_heads_stay() -> None:
    run = toy.federate(toy.method("pfedfda"))
    sent = list(run.updates[1].values())
    assert all(update.parts.keys() == {"extractor", "gaussians"} for update in sent)
    total = sum(u.samples for u in sent)
    for key, tensor in run.shared["gaussians"].items():
        expected = sum(u.samples / total * u.parts["gaussians"][key] for u in sent)
        assert torch.allclose(tensor, expected, atol=1e-5)


def test_before_it_takes_part_a_client_uses_the_global_gaussians() -> None:
    run = toy.federate(toy.method("pfedfda"), cohort=lambda number: ["c0", "c4"])
    x, even = run.images("c1"), torch.full((10,), 0.1)
    head = discriminant(run.shared["gaussians"], even)
    assert torch.allclose(run.predict("c1"), run.method.classify({**run.shared, "head": head}, x), atol=1e-4)
    down = steps.broadcast(run.method, run.shared, "c1")
    up, own = steps.personalise(run.method, down, run.own["c1"], toy.batches("c1"))
    assert up == {} and float(own["history"]["trained"]) == 1
    assert not tree.same(own["head"], head)
