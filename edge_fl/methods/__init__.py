"""The methods by name, one file each. To add one: a file, and its class in METHODS. The suffix `+ft` adds fine-tuning.

A method outside this package is registered as an entry point, or named `package.module:Class` or `folder/module.py:Class`.
"""

from dataclasses import replace
from typing import Any

import torch

from edge_fl import plugins
from edge_fl.config import MethodSpec
from edge_fl.errors import EdgeFLError, MethodError, nearest
from edge_fl.learn import tree
from edge_fl.learn.network.part import Net
from edge_fl.learn.optimiser import Optimiser, optimiser
from edge_fl.methods.apfl import APFL
from edge_fl.methods.class_statistics import ClassStatistics
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.method import Hyper, Method, check_hypers, hypers_of, require_method
from edge_fl.methods.ditto import Ditto
from edge_fl.methods.dualfed import DualFed
from edge_fl.methods.fedala import FedALA
from edge_fl.methods.fedamp import FedAMP
from edge_fl.methods.fedas import FedAS
from edge_fl.methods.fedavg import FedAvg
from edge_fl.methods.fedbabu import FedBABU
from edge_fl.methods.fedbn import FedBN
from edge_fl.methods.fedcac import FedCAC
from edge_fl.methods.fedcgs import FedCGS
from edge_fl.methods.fedcp import FedCP
from edge_fl.methods.fedcrc import FedCRC
from edge_fl.methods.fedcrl import FedCRL
from edge_fl.methods.feddbe import FedDBE
from edge_fl.methods.feddyn import FedDyn
from edge_fl.methods.fedetf import FedETF
from edge_fl.methods.fedgh import FedGH
from edge_fl.methods.fedkd import FedKD
from edge_fl.methods.fedntd import FedNTD
from edge_fl.methods.fedpac import FedPAC
from edge_fl.methods.fedper import FedPer
from edge_fl.methods.fedproto import FedProto
from edge_fl.methods.fedprox import FedProx
from edge_fl.methods.fedrep import FedRep
from edge_fl.methods.fedrir import FedRIR
from edge_fl.methods.fedrod import FedRoD
from edge_fl.methods.finetuned import FineTuned
from edge_fl.methods.gpfl import GPFL
from edge_fl.methods.lgfedavg import LGFedAvg
from edge_fl.methods.local import Local
from edge_fl.methods.lpft import LPFT
from edge_fl.methods.moon import MOON
from edge_fl.methods.perfedavg import PerFedAvg
from edge_fl.methods.pfedfda import PFedFDA
from edge_fl.methods.pfedme import PFedMe
from edge_fl.methods.pretrained import Pretrained
from edge_fl.methods.repper import RepPer
from edge_fl.methods.scaffold import SCAFFOLD
from edge_fl.methods.spherefed import SphereFed
from edge_fl.models import build_net

METHODS: dict[str, type[Method]] = {method.title.lower(): method for method in (
    Local, FedAvg, FedProx, FedBABU, FedPer, FedRep, LGFedAvg, PFedMe, Ditto, PerFedAvg, MOON, FedAMP,
    FedALA, FedRoD, FedCP, FedBN, FedETF, SphereFed, FedPAC, FedProto, FedGH, FedKD, RepPer, FedCRC,
    FedCRL, FedRIR, DualFed, FedDBE, GPFL, FedCAC, FedAS, PFedFDA, LPFT, FedCGS, ClassStatistics,
    SCAFFOLD, FedDyn, FedNTD, APFL,
)}  # fmt: skip
# the listed ones; `+ft` works for any method with shared extractor and head
FINE_TUNED = ("fedavg+ft", "fedprox+ft")

PRETRAINED = "pretrained"  # trains nothing; not listed
ENTRY_POINTS = "edge_fl.methods"
_FT = "+ft"


def names() -> list[str]:
    """Names of all listed methods, those of installed packages included."""
    return sorted({*METHODS, *FINE_TUNED, *plugins.names(ENTRY_POINTS)})


def find(name: str) -> type[Method]:
    """The class of a name without `+ft`: of METHODS, of the entry point group `edge_fl.methods`, or of a module. Raises MethodError."""
    base = name.removesuffix(_FT)
    if name == PRETRAINED:
        return Pretrained
    if base in METHODS:
        return METHODS[base]
    if plugins.is_own(base):
        found = plugins.imported(base, "method", MethodError)
    elif not (found := plugins.registered(ENTRY_POINTS, base, "method", MethodError)):
        raise MethodError(f"method {name!r}: unknown{nearest(name, names())}")
    require_method(found, name)
    return found  # type: ignore[no-any-return]


def hypers(name: str) -> dict[str, tuple[Any, Hyper]]:
    """Default and `Hyper` of every hyper-parameter of a method by its name, including fine-tuning's. Raises MethodError."""
    return hypers_of(find(name)) | (hypers_of(FineTuned) if name.endswith(_FT) else {})


def build(name: str, net: Net, *, epochs: int = 1, optimiser: Optimiser, **options: Any) -> Method:
    """Build a method on a net; `options` are its hyper-parameters, including fine-tuning's. Raises MethodError."""
    check_hypers(name, options, hypers(name))
    method = find(name)
    own = {key: options.pop(key) for key in hypers_of(method) if key in options}
    try:
        inner = method(net, epochs, optimiser, **own)
    except Exception as error:
        if isinstance(error, EdgeFLError) or not plugins.own_line(error):
            raise
        raise MethodError(f"method {name!r}: {plugins.described(error)}") from error
    if not name.endswith(_FT):
        return inner
    if not {"extractor", "head"} <= steps.broadcast(inner, steps.start(inner), "").keys():
        raise MethodError(f"method {name!r}: fine-tuning needs a shared extractor and a shared head")
    if not _predicts_with_received_head(inner):
        raise MethodError(
            f"method {name!r}: its clients predict with a model of their own, which fine-tuning would not change"
        )
    return FineTuned(inner.net, epochs, optimiser, inner=inner, **options)


def _predicts_with_received_head(method: Method) -> bool:
    """Whether another received head changes the prediction of a client that has trained."""
    trained = {
        name: dict.fromkeys(spec.start, torch.tensor(1.0))
        for name, spec in method.parts.items()
        if spec.start
    }
    down, own = steps.broadcast(method, steps.start(method), ""), {**steps.start_own(method, ""), **trained}
    other = {**down, "head": tree.map(lambda t: t + torch.arange(t.numel()).reshape(t.shape), down["head"])}
    x = torch.ones(1, *method.net.input.shape)
    return not torch.equal(*(steps.predict(method, parts, own, x) for parts in (down, other)))


def build_method(spec: MethodSpec) -> Method:
    """Build a method from its spec, on server and devices: equal specs give equal initial values. Raises MethodError."""
    config = spec.method
    net = build_net(spec.model, spec.input, len(spec.classes), spec.seed)
    net = net.with_projector() if config.projector else net
    method = build(
        config.name, net, epochs=config.epochs, optimiser=optimiser(config.optimiser), **config.options
    )
    method = replace(
        method,
        compression=spec.compression,
        privacy=spec.privacy,
        augmentation=config.augment,
        norm_policy=config.batch_norm,
        total_rounds=spec.rounds,
        evaluate_every=spec.evaluate_every,
    )
    update_codec.require_possible(method)
    return method
