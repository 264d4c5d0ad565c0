"""Personal heads of chosen kinds on a run's final extractor, fitted as a head-only device fits them: the key `heads` of a recipe."""

import logging
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from edge_fl import heads, metrics
from edge_fl.data.samples import ClientData
from edge_fl.heads import fleet
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.head import Extras, FittableHead, Head, TrainingSet
from edge_fl.heads.plan import PLAIN, HeadPlan
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.wire import tensors
from edge_fl_lab import newcomers
from edge_fl_server.release import fleet_head
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, Reports, RunHooks, merged
from edge_fl_server.training.studies import Study

log = logging.getLogger(__name__)


class HeadsHook(RunHooks):
    """Measures the heads that a recipe names on the simulated clients, and the served head on those that never train, too."""

    def __init__(self, study: Study, device: str) -> None:
        self._study, self._device = study, device

    def measure(self, result: FinalResult, clients: Clients) -> Reports:
        recipe, data = self._study.recipe, self._study.data()
        method, shared = result.method, result.shared
        reports = fitted(recipe.heads, method, shared, data, recipe.seed, self._device)
        if heads.SERVED in recipe.heads and method.exports and (unseen := self._study.unseen_data()):
            release = release_of(method, shared, data, self._device)
            found = {
                id: {metrics.UNSEEN_SERVED: served(method, shared, each, release, recipe.seed, self._device)}
                for id, each in unseen.items()
            }
            reports = merged(reports, found)
        return reports


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
    kinds = [heads.resolve(name) for name in names if name != heads.SERVED]
    release = release_of(method, shared, clients, device) if heads.SERVED in names else None
    reports = {}
    for id, data in clients.items():
        z, test = (
            newcomers.features(method, shared, part, device).cpu().numpy() for part in (data.train, data.test)
        )
        known = classes or method.net.classes
        training = heads.training_set(
            z, data.train.y, known, method.unit_norm, "", seed, False, PLAIN, {}, groups=data.train.groups
        )
        found = {
            metrics.of_head(kind.kind): metrics.accuracy(_fit(kind, training).predict(test), data.test.y)
            for kind in kinds
        }
        if release:
            found[metrics.of_head(heads.SERVED)] = served(method, shared, data, release, seed, device)
        reports[id] = found
    return reports


def release_of(
    method: Method, shared: Parts, clients: Mapping[str, ClientData], device: str
) -> tuple[HeadPlan, Extras]:
    """The plan and the extras of a release of the method's extractor, with the fleet's head of these `clients`."""
    extras = to_arrays({name: shared[name] for name in method.head_tier.extras if shared.get(name)})
    plan = head_plan(method, 1, collect=False)
    if plan.fleet == PRIOR:
        return plan, extras
    computed = fleet_head.compute(method, shared, clients.values(), method.net.classes, device)
    plan = replace(plan, fleet=fleet.FLEET, shares=computed.shares)
    return plan, {**extras, **tensors.unpack(computed.payload)}


def served(
    method: Method,
    shared: Parts,
    data: ClientData,
    release: tuple[HeadPlan, Extras],
    seed: int,
    device: str = "cpu",
) -> float:
    """Test accuracy of the head that a client serves as a head-only device."""
    z, test = (
        newcomers.features(method, shared, part, device).cpu().numpy() for part in (data.train, data.test)
    )
    plan, extras = release
    head = heads.fit(
        "logistic",
        z,
        data.train.y,
        method.net.classes,
        unit_norm=method.unit_norm,
        seed=seed,
        plan=plan,
        extras=extras,
        groups=data.train.groups,
    )
    return metrics.accuracy(head.predict(test), data.test.y)


def _fit(kind: type[FittableHead], training: TrainingSet) -> Head:
    return (kind if len(training.present) > 1 else heads.Constant).fit(training)
