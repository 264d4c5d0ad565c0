"""Personal heads of chosen kinds on a run's final extractor, fitted as a head-only device fits them: the key `heads` of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from edge_fl import heads, metrics
from edge_fl.data.samples import ClientData
from edge_fl.heads.head import Head, TrainingSet
from edge_fl.heads.plan import PLAIN
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl_server.training import newcomers

log = logging.getLogger(__name__)

Reports = dict[str, dict[str, float]]  # metrics by client


def fitted(
    names: Sequence[str],
    method: Method,
    shared: Parts,
    clients: Mapping[str, ClientData],
    seed: int,
    device: str = "cpu",
    classes: int = 0,
) -> Reports:
    """Test accuracy of each head, by client; empty for a method that shares no extractor.

    `classes` are those of the data (0: the method's). Raises ConfigError for an unknown head, DataError for images of another shape.
    """
    if not method.exports:
        log.warning("%s: shares no extractor; no heads are fitted on it", method.title)
        return {}
    kinds = [heads.resolve(name) for name in names]
    reports: Reports = {}
    for id, data in clients.items():
        z, test = (
            newcomers.features(method, shared, part, device).cpu().numpy() for part in (data.train, data.test)
        )
        known = classes or method.net.classes
        training = heads.training_set(z, data.train.y, known, method.unit_norm, "", seed, False, PLAIN, {})
        reports[id] = {
            metrics.of_head(kind.kind): metrics.accuracy(_fit(kind, training).predict(test), data.test.y)
            for kind in kinds
        }
    return reports


def _fit(kind: type[Head], training: TrainingSet) -> Head:
    return (kind if len(training.present) > 1 else heads.Constant).fit(training)
