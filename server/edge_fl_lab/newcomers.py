"""The papers' protocols for new clients (docs/methods.md G16).

FedCRC, Table II (`newcomers_model`, `meet`): some clients never train, and a shared model is tested on them. Where heads are personal, the
paper uses their mean; only a simulation can compute it, because no server ever holds a head. RepPer, Figure 6 (`learn_new_task`): the
extractor stays frozen, and every client of another task fits a new head, batch after batch.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edge_fl import metrics
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError, MethodError, nearest
from edge_fl.learn.aggregation.mean import Mean
from edge_fl.learn.batches import Batch, Batches, in_batches
from edge_fl.learn.fit import descend, scan
from edge_fl.learn.losses import cross_entropy
from edge_fl.learn.network.part import Part
from edge_fl.learn.optimiser import Optimiser, Sgd
from edge_fl.learn.tree import Params, Parts, parameters, to_device
from edge_fl.methods.contract import norm, steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import BatchNorm, Method
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, Reports, RunHooks, merged
from edge_fl_server.training.studies import Study

log = logging.getLogger(__name__)

Predict = Callable[[Tensor], Tensor]  # samples [N, ...] -> logits [N, classes]
Model = Callable[[Tensor], Predict]  # a new client's training samples without labels -> its prediction function
HIDDEN = 256  # docs/methods-on-devices.md, "Heads"
HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda dim, classes: nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)),
}


class NewcomersHook(RunHooks):
    """Measures the clients that never train (`[data] unseen`), where all training clients are simulated here."""

    def __init__(self, study: Study, device: str) -> None:
        self._study, self._device = study, device

    def measure(self, result: FinalResult, clients: Clients) -> Reports:
        recipe, unseen, device = self._study.recipe, self._study.unseen_data(), self._device
        if recipe.source != "simulated":
            return {}
        method, shared = result.method, result.shared
        samples = {id: len(data.train) for id, data in self._study.data().items() if id in result.trained}
        model = newcomers_model(method, shared, clients.personal_state(), samples)
        reports: Reports = meet(model, unseen, device) if model else {}
        if epochs := recipe.data.unseen_epochs:
            kind = recipe.method.batch_size, recipe.seed, device
            new = [Client(id, data, len(self._study.spec.classes), *kind) for id, data in unseen.items()]
            own = clients.personal_state()
            reports = merged(reports, fine_tuned(method, shared, own, samples, new, epochs))
        return reports


def newcomers_model(
    method: Method, shared: Parts, own: Iterable[tuple[str, Parts]], samples: Mapping[str, int]
) -> Model | None:
    """The model that a new client can use; None if the method has none.

    It is the global model, or else the shared extractor with the mean of the personal heads. `own` are the clients' personal parts; those
    in `samples` count, weighted by their training samples. Where only BatchNorm is personal, the new client measures its own statistics.
    """
    if method.has_global:
        return lambda _: lambda x: steps.predict_global(method, shared, x)
    if method.batch_norm is BatchNorm.LOCAL_BN:
        return lambda x: partial(method.predict, norm.newcomer(method, shared, x))
    if (head := _mean_head(method, own, samples)) is None:
        log.warning("%s: has no model for new clients; %s is not measured", method.title, metrics.UNSEEN_TEST)
        return None
    return lambda _: partial(method.classify, {**norm.for_export(shared), "head": head})


def fine_tuned(
    method: Method,
    shared: Parts,
    own: Iterable[tuple[str, Parts]],
    samples: Mapping[str, int],
    clients: Iterable[Client],
    epochs: int,
) -> Reports:
    """Test accuracy of new clients after they fine-tuned a head on the frozen shared extractor; empty without such an extractor.

    They start from the global head, else from the mean of the personal heads, else from the initial head; other arguments as above.
    """
    if "extractor" not in method.exports or "extractor" not in shared:
        return {}
    start = (
        shared.get("global_head")
        or shared.get("head")
        or _mean_head(method, own, samples)
        or method.net.head.init()
    )
    features = partial(steps.exported_features, method, shared)
    reports = {}
    for client in clients:
        head = to_device({"head": start}, client.device)["head"]
        head = method.train(
            method.head_loss, head, client.batches(0).mapped(features), stage="unseen", epochs=epochs
        )
        z = in_batches(features, torch.from_numpy(client.data.test.x).to(client.device))
        predicted = method.net.head.frozen(head, z).argmax(1).cpu().numpy()
        reports[client.id] = {metrics.UNSEEN_AFTER: metrics.accuracy(predicted, client.data.test.y)}
    return reports


def _mean_head(method: Method, own: Iterable[tuple[str, Parts]], samples: Mapping[str, int]) -> Params | None:
    """Mean of the personal heads of the clients in `samples`, None if there are none."""
    mean = Mean()
    if _has_personal_heads(method):
        for client, parts in own:
            if client in samples:
                mean.add(parts["head"], samples[client])
    return mean.value()


def _has_personal_heads(method: Method) -> bool:
    """Whether clients share a whole extractor and have personal heads on its features (a head that the method builds has other inputs)."""
    head = method.parts.get("head")
    return "extractor" in method.exports and head is not None and not head.travels and head.build is None


def meet(model: Model, clients: Mapping[str, ClientData], device: str = "cpu") -> Reports:
    """Test accuracy of a model, without adaptation, on clients that never trained."""
    reports = {}
    for id, data in clients.items():
        predict = model(torch.from_numpy(data.train.x).to(device))
        logits = in_batches(predict, torch.from_numpy(data.test.x).to(device))
        accuracy = metrics.accuracy(logits.argmax(1).cpu().numpy(), data.test.y)
        reports[id] = {metrics.UNSEEN_TEST: accuracy, metrics.TEST_SAMPLES: float(len(data.test))}
    return reports


@dataclass(frozen=True)
class HeadTraining:
    """Training of a head on a new task: `iterations` batches; accuracy is measured before the first and after every `every`."""

    iterations: int = 100
    every: int = 10
    batch_size: int = 256
    head: str = "mlp"
    optimiser: Optimiser = Sgd(0.1, momentum=0.9)
    seed: int = 0


def learn_new_task(
    method: Method,
    shared: Parts,
    clients: Mapping[str, ClientData],
    classes: int,
    training: HeadTraining,
    device: str = "cpu",
    watch: Watch = unwatched,
) -> Mapping[int, Reports]:
    """Fit a new head for every client on the frozen extractor -> test accuracy by iteration and client. The task may have other classes.

    Raises MethodError for a method that shares no extractor or an unknown head, DataError for samples of another shape.
    """
    part = _new_head(method, classes, training)

    def loss(head: Params, batch: Batch) -> Tensor:
        return cross_entropy(part(head, batch.x), batch.y, batch.mask)

    def step(carry: tuple[Params, Any], batch: Batch) -> tuple[Params, Any]:
        return descend(loss, *carry, batch, training.optimiser)

    reports: dict[int, dict[str, Mapping[str, float]]] = {}
    for fitted, (id, data) in enumerate(clients.items()):
        watch(Count("heads", fitted, len(clients)))
        train = features(method, shared, data.train, device)
        test = features(method, shared, data.test, device)
        if not method.unit_norm:
            train, test = _standardised(train, train), _standardised(test, train)
        y = torch.from_numpy(data.train.y).to(device)
        batches = Batches(train, y, classes, training.batch_size, training.seed, 0, id)
        head = part.init()
        carry = (head, training.optimiser.init(parameters(head)))
        for done in range(0, training.iterations + 1, training.every):
            if done:
                stage = {"stage": f"task.{done}", "epochs": training.every, "limit": training.every}
                carry = scan(step, carry, batches, **stage)  # type: ignore[arg-type]
            predicted = part.frozen(carry[0], test).argmax(1).cpu().numpy()
            reports.setdefault(done, {})[id] = {
                metrics.PERSONAL_AFTER: metrics.accuracy(predicted, data.test.y),
                metrics.TEST_SAMPLES: float(len(data.test)),
            }
    watch(Count("heads", len(clients), len(clients)))
    return reports


def _new_head(method: Method, classes: int, training: HeadTraining) -> Part:
    if not method.exports:
        raise MethodError(f"{method.title}: shares no extractor, so no new head can use it")
    if training.head not in HEADS:
        raise MethodError(f"head {training.head!r}: unknown{nearest(training.head, HEADS)}")
    build = partial(HEADS[training.head], method.net.feature_dim, classes)
    return Part("task", build, method.net.seed)  # the name determines the initial values


def features(method: Method, shared: Parts, samples: Samples, device: str) -> Tensor:
    """Features [N, d] of samples by the exported extractor. Raises DataError for samples of another shape."""
    if samples.shape != method.net.input.shape:
        raise DataError(
            f"the dataset's samples are {list(samples.shape)}, the extractor takes {list(method.net.input.shape)}"
        )
    x = torch.from_numpy(samples.x).to(device)
    return in_batches(lambda batch: steps.exported_features(method, shared, batch), x)


def _standardised(z: Tensor, train: Tensor) -> Tensor:
    """Standardise features by a client's training data, to a length of about 1, as the step size expects (`edge_fl.heads.mlp`)."""
    return (z - train.mean(0)) / (train.std(0, correction=0).clamp(min=1e-6) * z.shape[1] ** 0.5)
