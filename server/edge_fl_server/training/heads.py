"""Personal heads of chosen kinds on a run's final extractor, fitted as a head-only device fits them: the key `heads` of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from edge_fl import heads, metrics
from edge_fl.data.samples import ClientData, Samples
from edge_fl.heads.head import Features, Head, TrainingSet
from edge_fl.heads.plan import PLAIN
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method

log = logging.getLogger(__name__)

Reports = dict[str, dict[str, float]]  # metrics by client


def fitted(
    names: Sequence[str],
    method: Method,
    shared: Parts,
    clients: Mapping[str, ClientData],
    seed: int,
    device: str = "cpu",
) -> Reports:
    """Test accuracy of each head, by client; empty for a method that shares no extractor. Raises ConfigError for an unknown head."""
    if not method.exports:
        log.warning("%s: shares no extractor; no heads are fitted on it", method.title)
        return {}
    kinds = [heads.resolve(name) for name in names]
    features = partial(_features, method, shared, device)
    reports: Reports = {}
    for id, data in clients.items():
        z, y = features(data.train), data.train.y
        training = heads.training_set(z, y, method.net.classes, method.unit_norm, "", seed, False, PLAIN, {})
        test = features(data.test)
        reports[id] = {
            metrics.of_head(kind.kind): metrics.accuracy(_fit(kind, training).predict(test), data.test.y)
            for kind in kinds
        }
    return reports


def _fit(kind: type[Head], training: TrainingSet) -> Head:
    return (kind if len(training.present) > 1 else heads.Constant).fit(training)


def _features(method: Method, shared: Parts, device: str, samples: Samples) -> Features:
    x = torch.from_numpy(samples.x).to(device)
    z: Features = in_batches(lambda batch: steps.exported_features(method, shared, batch), x).cpu().numpy()
    return z
