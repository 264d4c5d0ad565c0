"""The methods that are compared: their settings in edge-fl and PFLlib, and which weights both sides have after a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.bench.peers.report import TOLERANCE

MODEL = ("extractor", "head")
# A whole personal model is no mean over clients, so that rounding errors do not cancel: from weights moved by one unit in the last place,
# edge-fl itself ends up to 8.9e-5 away after an epoch.
PERSONAL_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Size:
    """A federation: `images` of `shape` are divided by a Dirichlet distribution with concentration `alpha`."""

    clients: int
    images: int
    shape: tuple[int, int, int]
    alpha: float


IMAGES, QUICK_IMAGES = Size(20, 6000, (3, 32, 32), 0.1), Size(3, 240, (3, 16, 16), 0.5)
PIXELS, QUICK_PIXELS = Size(100, 11_000, (1, 28, 28), 1.0), Size(5, 400, (1, 8, 8), 1.0)


@dataclass(frozen=True)
class Case:
    """A method on all sides.

    stages: edge-fl's stages of local training and their epochs, in the order in which PFLlib runs them. shared, own: the parts that the
    server and each client have after a round. server: PFLlib's server, as module:class. arguments: those of its main.py. split: whether
    PFLlib's model has a separate head. linear: one linear layer on pixels instead of two convolutions. others: sides besides edge-fl and
    PFLlib. tolerance: of the weights.
    """

    title: str
    method: str
    stages: tuple[tuple[str, int], ...]
    server: str
    options: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    split: bool = False
    linear: bool = False
    others: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    def size(self, quick: bool) -> Size:
        if self.linear:
            return QUICK_PIXELS if quick else PIXELS
        return QUICK_IMAGES if quick else IMAGES


CASES: dict[str, Case] = {
    "fedavg": Case(
        "FedAvg",
        "fedavg",
        (("train", 1),),
        "serveravg:FedAvg",
        shared=MODEL,
        others=("plain", "flower", "pfl-research"),
    ),
    "fedrep": Case(
        "FedRep, 10 head epochs",
        "fedrep",
        (("s1", 10), ("s2", 1)),
        "serverrep:FedRep",
        {"head_epochs": 10},
        arguments={"plocal_epochs": 10},
        shared=("extractor",),
        own=("head",),
        split=True,
    ),
    "fedproto": Case(
        "FedProto",
        "fedproto",
        (("personal", 1),),
        "serverproto:FedProto",
        {"lam": 1.0, "means": "during"},  # as PFLlib, which has no pass over the images after training
        arguments={"lamda": 1.0},
        own=MODEL,
        split=True,
        tolerance=PERSONAL_TOLERANCE,
    ),
    "ditto": Case(
        "Ditto",
        "ditto",
        (("personal", 1), ("train", 1)),
        "serverditto:Ditto",
        {"lam": 1.0},
        arguments={"mu": 1.0, "plocal_epochs": 1},
        shared=MODEL,
        own=("personal_extractor", "personal_head"),
        tolerance=PERSONAL_TOLERANCE,
    ),
    "moon": Case(
        "MOON",
        "moon",
        (("train", 1),),
        "servermoon:MOON",
        {"mu": 1.0, "temperature": 0.5, "moon_proj": 0},
        arguments={"mu": 1.0, "tau": 0.5},
        shared=MODEL,
        split=True,
    ),
    "linear": Case(
        "FedAvg, linear models",
        "fedavg",
        (("train", 1),),
        "serveravg:FedAvg",
        shared=("head",),
        linear=True,
        others=("plain", "flower", "pfl-research"),
    ),
    "heads": Case(
        "personal linear heads",
        "fedrep",
        (("s1", 1),),
        "serverlocal:Local",
        {"head_epochs": 1},
        epochs=0,
        own=("head",),
        linear=True,
    ),
}
