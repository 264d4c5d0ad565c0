"""Personal heads of chosen kinds on a run's final extractor, fitted as a head-only device fits them: the key `heads` of a recipe."""

import logging
from collections.abc import Mapping, Sequence

from edge_fl import heads, metrics
from edge_fl.data.samples import ClientData
from edge_fl.heads.head import Head, TrainingSet
from edge_fl.heads.plan import PLAIN
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl_lab import newcomers
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, Reports, RunHooks
from edge_fl_server.training.studies import Study

log = logging.getLogger(__name__)


class HeadsHook(RunHooks):
    """Measures the heads that a recipe names on the simulated clients."""

    def __init__(self, study: Study, device: str) -> None:
        self._study, self._device = study, device

    def measure(self, result: FinalResult, clients: Clients) -> Reports:
        recipe, data = self._study.recipe, self._study.data()
        return fitted(recipe.heads, result.method, result.shared, data, recipe.seed, self._device)


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
    reports = {}
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
