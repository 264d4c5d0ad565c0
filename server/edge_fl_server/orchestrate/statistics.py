"""Class statistics of a run's devices: their sum, added to that of earlier runs, becomes the prior of a further release of the extractor.

The sum so far is in the newest kept release of the same extractor, so that nothing else has to be stored; every release of this extractor
takes it over. A sum that does not complete changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_fl.config import Recipe, StatisticsConfig
from edge_fl.errors import ConfigError, StatisticsError
from edge_fl.heads.plan import Way
from edge_fl.heads.statistics import class_statistics
from edge_fl.heads.statistics.class_statistics import RELEASES, Statistics
from edge_fl.heads.statistics.prior import PRIOR
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifest import Manifest
from edge_fl.secure import fixed_point
from edge_fl.secure.server import Sum
from edge_fl.wire import tensors
from edge_fl.wire.egress import STATISTICS
from edge_fl.wire.identity import CA_FILE
from edge_fl_server.mqtt.session import Server
from edge_fl_server.mqtt.updates.secure_sums import SecureSums, SumOptions
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
from edge_fl_server.runs.results import SumRecord

INHERITED: Mapping[str, Way] = {PRIOR: "cosine"}
"""The prior stays with its extractor, and heads on a release with it are cosine heads."""
WAYS = ("own", "cosine")
"""Ways of fitting heads that a prior replaces; the other ways are those of a method's own head."""


class StatisticsCollector:
    """Collects the class statistics of a server's devices as `[statistics]` of the recipe says."""

    def __init__(self, recipe: Recipe, server: Server) -> None:
        identity = recipe.broker.identity
        self._masked = recipe.statistics.sums == "masked"
        self._options = _options(recipe.statistics)
        self._sums = SecureSums(server, (Path(identity) / CA_FILE).read_bytes() if identity else None)

    def release(self, rollout: RolloutCoordinator) -> SumRecord:
        """Collect a sum on the current release, add that of earlier runs, and release the extractor again with their prior.

        Raises SecureSumError and StatisticsError if there is no usable sum; an earlier prior then stays in use.
        """
        manifest = rollout.current
        assert manifest is not None
        earlier, releases = _earlier(rollout, manifest)
        found, record = self._collect(manifest)
        if earlier:
            found = class_statistics.from_flat(found.flat + earlier.flat, found.shape, exact=False)
        prior = {**found.arrays(), RELEASES: np.array([*releases, manifest.release], np.int64)}
        rollout.extend({PRIOR: tensors.pack({PRIOR: prior})}, INHERITED[PRIOR])
        return record

    def _collect(self, manifest: Manifest) -> tuple[Statistics, SumRecord]:
        shape = class_statistics.shape_of(len(manifest.classes), manifest.feature_dim)
        total = self._sums.collect(STATISTICS, manifest.release, shape.length, self._options)
        found = class_statistics.from_flat(total.vector, shape, exact=not self._options.clip)
        return found, self._record(total, manifest.release, found)

    def _record(self, total: Sum, release: int, found: Statistics) -> SumRecord:
        bytes_each = len(total.vector) * fixed_point.BYTES
        pictures = max(round(float(np.sum(found.counts))), 0)
        return SumRecord(release, total.devices, bytes_each, self._masked, pictures, total.epsilon)


def require_possible(recipe: Recipe, method: Method) -> None:
    """Raise ConfigError if the recipe's `[statistics]` cannot be carried out with its method and identity."""
    sums, identity = recipe.statistics.sums, recipe.broker.identity
    if sums == "none":
        return
    if not method.exports or method.head_tier.way not in WAYS:
        raise ConfigError(
            f"[statistics] sums = {sums!r}: {method.title} has a head of its own or no extractor for devices, so no prior is used;"
            " expected 'none'"
        )
    if (sums == "masked") != bool(identity):
        raise ConfigError(
            f"[statistics] sums = {sums!r} {'with' if identity else 'without'} an identity of the server: expected"
            f" {'masked: devices with certificates send nothing else' if identity else 'plain, or certificates for masked sums'}"
        )
    _options(recipe.statistics)


def _options(config: StatisticsConfig) -> SumOptions:
    return SumOptions(
        minimum=config.minimum,
        masked=config.sums == "masked",
        clip=config.clip,
        noise_multiplier=config.noise_multiplier,
    )


def _earlier(rollout: RolloutCoordinator, manifest: Manifest) -> tuple[Statistics | None, list[int]]:
    """The sum of earlier runs on the same extractor, and the releases on which it was collected.

    Raises StatisticsError if no sum for the present classes can be added to it.
    """
    if (payload := rollout.earlier_extra(PRIOR, manifest)) is None:
        return None, []
    classes, arrays = len(manifest.classes), tensors.unpack(payload)[PRIOR]
    found = class_statistics.from_arrays(arrays).grown(classes)
    if found.shape != (expected := class_statistics.shape_of(classes, manifest.feature_dim)):
        raise StatisticsError(f"statistics of an earlier release: {found.shape}, expected {expected}")
    return found, arrays.get(RELEASES, np.empty(0, np.int64)).tolist()
