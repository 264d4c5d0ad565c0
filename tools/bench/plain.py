"""The plain loop: one client after the other, each with a model, optimisers and a DataLoader, as most research code is written.

It is a fair opponent: images are normalised float tensors in memory, frozen parts need no gradient, and the loader uses the batches that
our engines draw, so that the resulting weights can be compared. Like typical research code, it builds a client's list of (image, label)
anew in every round and runs a frozen network again for every batch of a head.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from edge_fl.learn.tree import BUFFER, Params, Parts
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.models.resnet import resnet18, resnet34
from edge_fl_server.training.studies import ClientStore
from tools.bench.measure import settle

HEAD = ("weight", "bias")


class Model(nn.Module):
    """An extractor (`base`) and a head."""

    def __init__(self, store: ClientStore) -> None:
        super().__init__()
        spec = store.settings.spec
        self.base: nn.Module = BASES[spec.model.name](store)
        method = build_method(spec)
        self.head = nn.Linear(method.net.feature_dim, len(spec.classes))
        start = steps.start(method) | steps.start_own(method, "")
        _load(self.base, start["extractor"])
        _load(self.head, start.get("head") or start["global_head"])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def cnn2(store: ClientStore) -> nn.Module:
    """Two convolutions and a linear layer."""
    input = store.settings.spec.input
    first = [nn.Conv2d(input.channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    across, down = (((side - 4) // 2 - 4) // 2 for side in (input.width, input.height))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * across * down, 512), nn.ReLU())


def pixels(store: ClientStore) -> nn.Module:
    """Pixels as features, or one hidden layer."""
    spec = store.settings.spec
    hidden, inputs = int(spec.model.options["hidden"]), math.prod(spec.input.shape)  # type: ignore[arg-type]
    return nn.Sequential(nn.Flatten(), *([nn.Linear(inputs, hidden), nn.ReLU()] if hidden else []))


BASES: dict[str, Callable[[ClientStore], nn.Module]] = {
    "cnn2": cnn2,
    "tools.bench.networks:Pixels": pixels,
    "resnet18": lambda store: resnet18(store.settings.spec.input),
    "resnet34": lambda store: resnet34(store.settings.spec.input),
}


@dataclass
class PlainLoop:
    """The plain federation: the server's model and one per client. `shared` selects the module that is averaged and broadcast."""

    store: ClientStore
    train: "Callable[[PlainLoop, str, Model, int], None]"
    shared: Callable[[Model], nn.Module] = lambda model: model
    device: str = "cpu"

    def __post_init__(self) -> None:
        spec = self.store.settings.spec
        self.lr = spec.method.optimiser.lr
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (spec.input.mean, spec.input.std))
        self.clients = dict(self.store)
        data = {id: client.data.train for id, client in self.clients.items()}
        self.x = {
            id: (torch.from_numpy(train.x).float().div(255.0) - mean) / std for id, train in data.items()
        }
        self.y = {id: torch.from_numpy(train.y) for id, train in data.items()}
        self.server = Model(self.store).to(self.device)
        self.own: dict[str, nn.Module] = {}  # heads that are not part of the model
        self.norm = any(isinstance(layer, _BatchNorm) for layer in self.server.modules())
        self.models = {id: copy.deepcopy(self.server) for id in self.clients}

    def __call__(self) -> None:
        """Run round 1 again and wait for its end."""
        self.round()
        settle(self.device)

    def round(self, number: int = 1) -> None:
        """Broadcast, train one client after the other, average by samples."""
        for id, model in self.models.items():
            for new, old in self._pairs(model):
                old.data = new.data.clone()
            self.train(self, id, model, number)
        total = sum(map(len, self.y.values()))
        for parameter in self.shared(self.server).parameters():
            parameter.data.zero_()
        for id, model in self.models.items():
            for mean, one in self._pairs(model):
                mean.data += one.data.clone() * (len(self.y[id]) / total)

    def batches(self, id: str, stage: str, round: int, epochs: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's batches of a stage, as our engines draw them."""
        order = self.clients[id].batches(round).order(stage, epochs, norm=self.norm)
        rows = [rows.tolist() for epoch in order for rows in epoch]
        dataset = list(zip(self.x[id], self.y[id], strict=True))
        for x, y in DataLoader(dataset, batch_sampler=rows):  # type: ignore[arg-type]
            yield x.to(self.device), y.to(self.device)

    def parts(self) -> Parts:
        """The shared extractor and head, and every client's own head as `<client>.head`."""
        net = build_method(self.store.settings.spec).net
        names = [name for name in net.extractor.init() if not name.startswith(BUFFER)]
        parts = {"extractor": _read(self.server.base, names), "head": _read(self.server.head, HEAD)}
        heads = {id: self.own.get(id, model.head) for id, model in self.models.items()}
        return parts | {f"{id}.head": _read(head, HEAD) for id, head in heads.items()}

    def _pairs(self, model: Model) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.shared(self.server).parameters(), self.shared(model).parameters(), strict=True)


Loss = Callable[[Tensor, Tensor], Tensor]  # (images, labels) -> scalar


def descend(
    model: nn.Module, trained: nn.Module, lr: float, batches: Iterator[tuple[Tensor, Tensor]], loss: Loss
) -> None:
    """One stage: only `trained` has gradients and an optimiser; the loss runs the whole network for every batch."""
    model.requires_grad_(False)
    trained.requires_grad_(True)
    optimiser = torch.optim.SGD(trained.parameters(), lr=lr)
    for x, y in batches:
        optimiser.zero_grad()
        loss(x, y).backward()
        optimiser.step()


def fedavg(plain: PlainLoop, id: str, model: Model, round: int) -> None:
    """FedAvg: the whole model for one epoch."""
    descend(
        model, model, plain.lr, plain.batches(id, "train", round), lambda x, y: F.cross_entropy(model(x), y)
    )


def fedrep(head_epochs: int, epochs: int = 1) -> Callable[[PlainLoop, str, Model, int], None]:
    """FedRep: the client's own head for some epochs, then the extractor."""

    def train(plain: PlainLoop, id: str, model: Model, round: int) -> None:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

        descend(model, model.head, plain.lr, plain.batches(id, "s1", round, head_epochs), loss)
        if epochs:
            descend(model, model.base, plain.lr, plain.batches(id, "s2", round, epochs), loss)

    return train


def fedcrc(epochs: int) -> Callable[[PlainLoop, str, Model, int], None]:
    """FedCRC: extractor with the global head, then the client's own head, then one epoch of distillation into the global head."""

    def train(plain: PlainLoop, id: str, model: Model, round: int) -> None:
        own = plain.own.setdefault(id, copy.deepcopy(model.head))
        f, lr = model.base, plain.lr

        def distillation(x: Tensor, y: Tensor) -> Tensor:
            z = f(x)
            logits, teacher = model.head(z), F.log_softmax(own(z), dim=1)
            pull = F.kl_div(F.log_softmax(logits, dim=1), teacher, reduction="batchmean", log_target=True)
            return F.cross_entropy(logits, y) + pull

        descend(
            model, f, lr, plain.batches(id, "s1", round, epochs), lambda x, y: F.cross_entropy(model(x), y)
        )
        f.requires_grad_(False)
        descend(
            own, own, lr, plain.batches(id, "s2", round, epochs), lambda x, y: F.cross_entropy(own(f(x)), y)
        )
        own.requires_grad_(False)
        descend(model, model.head, lr, plain.batches(id, "s3", round), distillation)

    return train


def difference(ours: Parts, theirs: Parts) -> float:
    """The largest difference between parameters that both have."""
    return max(
        float((tensor.cpu() - theirs[part][name].cpu()).abs().max())
        for part, params in ours.items()
        for name, tensor in params.items()
        if name in theirs.get(part, {})
    )


def _load(module: nn.Module, params: Params) -> None:
    values = [tensor for name, tensor in params.items() if not name.startswith(BUFFER)]
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.data = value.clone()


def _read(module: nn.Module, names: Sequence[str]) -> Params:
    return {
        name: parameter.detach().clone() for name, parameter in zip(names, module.parameters(), strict=True)
    }
