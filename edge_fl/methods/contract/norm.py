"""BatchNorm policies (docs/methods.md G6), applied around a method's functions; methods are not aware of them.

Under `local_stats` and `local_bn` some BatchNorm tensors of a shared part stay on the client, in the personal part ``<part>.norm``. A
client still sends its running statistics as ``<part>.export_norm``; the server averages them into exports and never broadcasts them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Mean, Update
from edge_fl.learn.batches import EVALUATION_BATCH
from edge_fl.learn.pictures import pixels
from edge_fl.learn.tree import Params, Parts, merge
from edge_fl.methods.contract.method import BatchNorm, Method

OWN, EXPORT = ".norm", ".export_norm"
SETTLED = 30  # updates after which 4 % of the initial statistics remain


def kept(method: Method, part: str) -> frozenset[str]:
    """The tensors of a shared part that stay on the client."""
    if part not in method.net.parts or method.batch_norm is BatchNorm.SYNC:
        return frozenset()
    module = method.net.parts[part]
    return module.norm_statistics if method.batch_norm is BatchNorm.LOCAL_STATS else module.norm


def own_at_start(method: Method) -> Parts:
    """A client's local BatchNorm tensors before its first round."""
    shared = {part: method.net.parts[part].init() for part in method.travelling() if kept(method, part)}
    return {part + OWN: _only(params, kept(method, part)) for part, params in shared.items()}


def stripped(method: Method, parts: Parts) -> Parts:
    """Parts without the tensors that stay on the clients."""
    return {part: _without(params, kept(method, part)) for part, params in parts.items()}


def restored(parts: Parts, own: Parts) -> Parts:
    """Received parts completed by the client's own BatchNorm tensors."""
    return merge(
        parts, {name.removesuffix(OWN): params for name, params in own.items() if name.endswith(OWN)}
    )


def separated(method: Method, up: Parts) -> tuple[Parts, Parts]:
    """Split an update -> (parts to send, including the statistics for exports; the client's local tensors)."""
    exported = {
        part + EXPORT: _only(params, kept(method, part)) for part, params in up.items() if kept(method, part)
    }
    own = {part + OWN: _only(params, kept(method, part)) for part, params in up.items() if kept(method, part)}
    return {**stripped(method, up), **exported}, own


class ExportMean:
    """Separates the export statistics from a stream of updates and averages them."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def extract(self, updates: Iterable[Update], *, uniform: bool) -> Iterator[Update]:
        """The updates without their export statistics."""
        for update in updates:
            for name in [name for name in update.parts if name.endswith(EXPORT)]:
                self._means.setdefault(name, Mean()).add(update.parts[name], 1 if uniform else update.samples)
            yield replace(update, parts={n: p for n, p in update.parts.items() if not n.endswith(EXPORT)})

    def value(self) -> Parts:
        """The averaged statistics by part name."""
        return {name: value for name, mean in self._means.items() if (value := mean.value()) is not None}


def for_export(shared: Parts) -> Parts:
    """Shared parts with the averaged export statistics inserted."""
    averaged = {name.removesuffix(EXPORT): params for name, params in shared.items() if name.endswith(EXPORT)}
    return merge({name: params for name, params in shared.items() if not name.endswith(EXPORT)}, averaged)


def estimated(method: Method, down: Parts, own: Parts, x: Tensor) -> Parts:
    """Personal parts with the extractor's running statistics measured on the client's own pixels x."""
    if "extractor" + OWN not in own:
        return own
    extractor = tree.clone(restored(down, own)["extractor"])
    chunks = [chunk for chunk in x.split(EVALUATION_BATCH) if len(chunk) > 1]
    with torch.no_grad():
        for chunk in chunks * -(-SETTLED // max(len(chunks), 1)):
            method.net.extractor(extractor, pixels(chunk))  # updates the buffers in place
    return {**own, "extractor" + OWN: _only(extractor, kept(method, "extractor"))}


def newcomer(method: Method, shared: Parts, x: Tensor) -> Parts:
    """Shared parts for a client that never trained: averaged BatchNorm, its statistics updated by one pass over pixels x (FedBN)."""
    whole = for_export(shared)
    extractor = tree.clone(whole["extractor"])
    with torch.no_grad():
        for chunk in x.split(EVALUATION_BATCH):
            method.net.extractor(extractor, pixels(chunk))  # updates the buffers in place
    return {**whole, "extractor": extractor}


def _only(params: Params, names: frozenset[str]) -> Params:
    return {name: t for name, t in params.items() if name in names}


def _without(params: Params, names: frozenset[str]) -> Params:
    return {name: t for name, t in params.items() if name not in names}
