"""Class statistics of a fleet's devices: their sum, added to the earlier ones, becomes the prior of a further release of the extractor.

The sum so far is in the newest kept release of the same extractor, so that nothing else has to be stored; every release of this extractor
takes it over. A sum that does not complete, or that the devices in it cannot have sent, changes nothing; so a server may end at any
moment. Where the sum is plain, each device's statistics are checked by themselves and compared with those of the others, class by class.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from msgspec.structs import replace

from edge_fl.errors import ConfigError, SecureSumError, StatisticsError
from edge_fl.failures import Failure
from edge_fl.heads.class_statistics import bounds, sums
from edge_fl.heads.class_statistics.bounds import Senders
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.class_statistics.sums import (
    ADDED,
    ALL_CLASSES,
    DEVICES,
    LEFT_OUT,
    MOST_LEFT_OUT,
    MOST_SUMS,
    Doubles,
    Labels,
    Shape,
    Statistics,
    key_of,
    left_out_key,
)
from edge_fl.heads.plan import Way
from edge_fl.heads.promise import BINS, limited
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import norm, steps, tiers
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifests import Manifest
from edge_fl.secure import fixed_point
from edge_fl.secure.server import Sum
from edge_fl.wire import tensors
from edge_fl.wire.egress import STATISTICS, SURVIVALS
from edge_fl.wire.identity import CA_FILE
from edge_fl_server.mqtt.secure_sums import SecureSums, SumOptions
from edge_fl_server.mqtt.session import Server
from edge_fl_server.recipes.recipe import Recipe, RolloutConfig, StatisticsConfig
from edge_fl_server.registry import rollouts
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
from edge_fl_server.runs.results import RunSum

log = logging.getLogger(__name__)

INHERITED: Mapping[str, Way] = {PRIOR: "cosine"}
"""The prior stays with its extractor; a head of own labels on a release with it is a cosine head."""
NO_SURVIVALS = np.empty((0, BINS))
SLACK = 1e-3
"""By which a masked sum of histograms may be below 0 or above the number of devices."""
WAYS = ("own", "cosine")
"""Ways of fitting heads that a prior replaces; the other ways are those of a method's own head."""


class _Collected(NamedTuple):
    """One sum, or several: their keys, how many devices are in them, and what was left out."""

    found: Statistics
    added: tuple[int, ...]
    devices: int
    left_out: Labels
    survivals: Doubles = NO_SURVIVALS

    def with_survivals(self, rows: Doubles) -> Self:
        """The same with the survivals [2, BINS] of further devices."""
        return self._replace(survivals=self.survivals + rows if len(self.survivals) else rows)

    def plus(self, other: Self) -> Self:
        """Both together."""
        return type(self)(
            sums.from_flat(self.found.flat + other.found.flat, self.found.shape),
            (*self.added, *other.added),
            self.devices + other.devices,
            np.concatenate([self.left_out, other.left_out]),
            self.survivals if len(self.survivals) else other.survivals,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of the extra."""
        lists: dict[str, np.ndarray] = {
            ADDED: np.array(self.added, np.int32),
            DEVICES: np.array([self.devices], np.int32),
            LEFT_OUT: self.left_out[-MOST_LEFT_OUT:],
        }
        if len(self.survivals):
            lists[sums.SURVIVALS] = self.survivals.astype(np.float32)
        return {**self.found.arrays(), **lists}


class _Group(NamedTuple):
    collected: _Collected
    record: RunSum


class StatisticsCollector:
    """Collects the class statistics of a server's devices with these settings, whose `sums` are "masked" or "plain".

    identity: the folder of the server's certificate, if it has one.
    """

    def __init__(self, config: StatisticsConfig, server: Server, identity: Path | None) -> None:
        self._server, self._masked = server, config.sums == "masked"
        self._options = _options(config)
        self._sums = SecureSums(server, (identity / CA_FILE).read_bytes() if identity else None)

    def collect(
        self, rollout: RolloutCoordinator, plan: RolloutConfig | None = None, *, full: str = ""
    ) -> RunSum:
        """Collect sums on the current release, add the earlier ones, and release the extractor again with their prior, as `plan` says.

        full: RUN/ROUND whose final broadcast was the extractor that full devices have; they take part if the release is of this round.
        Raises SecureSumError and StatisticsError if there is no usable sum; an earlier prior then stays in use.
        """
        manifest = _collectable(rollout)
        shape = sums.shape_of(len(manifest.classes), manifest.feature_dim)
        earlier = self._earlier(rollout, manifest, shape)
        trained = f"{manifest.run_id}/{manifest.round}"
        groups, nothing = list[_Group](), None
        try:
            groups += self._groups(manifest, shape, trained if trained == full else "")
        except (SecureSumError, StatisticsError) as error:
            if earlier is None or len(earlier.survivals):
                raise
            nothing = error
        known, now, record = earlier, None, None
        for group in groups:
            now = now.plus(group.collected) if now else group.collected
            record = _joined(record, group.record) if record else group.record
        if earlier and (rows := self._survivals(manifest)) is not None:
            known = earlier.with_survivals(rows[0])
            record = record or rows[1]
        if record is None:
            assert nothing is not None
            raise nothing
        if rollout.current != manifest:
            raise StatisticsError(f"release {manifest.release} was replaced meanwhile")
        both = known.plus(now) if known and now else known or now
        assert both is not None  # there is a record of one
        extra = tensors.pack({PRIOR: both.arrays()})
        extended = rollout.extend({PRIOR: extra}, INHERITED[PRIOR], plan)
        journal = self._server.journal
        rollouts.record_release(journal.db, rollouts.published(journal.fleet, extended))
        return record

    def _survivals(self, manifest: Manifest) -> tuple[Doubles, RunSum] | None:
        """How probable labels were to the heads of the devices that have the prior; None without a sum, or with noise, which hides it."""
        if PRIOR not in manifest.extras or self._options.noise_multiplier:
            return None
        rows, names = np.zeros((2, BINS)), list[str]()
        options = replace_fields(self._options, clip=0.0)
        try:
            for total in self._sums.collect_groups(SURVIVALS, manifest.release, 2 * BINS, options):
                if isinstance(total, SecureSumError):
                    continue
                found = total.vector.reshape(2, BINS)
                if (found < -SLACK).any() or (found.sum(axis=1) > len(total.devices) + SLACK).any():
                    log.warning(
                        "survivals: a sum of %d devices that cannot be theirs; left out", len(total.devices)
                    )
                    continue
                rows += np.maximum(found, 0)
                names += total.devices
        except SecureSumError as error:
            log.info("survivals: none collected: %s", error)
        if not names:
            return None
        return limited(rows), RunSum(
            manifest.release, tuple(names), rows.size * fixed_point.BYTES, self._masked, 0
        )

    def _groups(self, manifest: Manifest, shape: Shape, trained: str) -> Iterator[_Group]:
        """The sums of the groups that completed. Raises as `collect` if there is none."""
        failed, usable = list[SecureSumError | StatisticsError](), False
        for total in self._sums.collect_groups(
            STATISTICS,
            manifest.release,
            shape.length,
            self._options,
            extractor=manifest.extractor.sha256,
            trained=trained,
        ):
            try:
                if isinstance(total, SecureSumError):
                    raise total
                now, names = self._collected(total, manifest, shape)
            except (SecureSumError, StatisticsError) as error:
                failed.append(error)
            else:
                usable = True
                yield _Group(now, self._record(manifest.release, now, names, total))
        if failed and not usable:
            raise failed[-1]
        for reason in failed:
            log.warning("class statistics: one of several groups of devices: %s", reason)

    def _collected(self, total: Sum, manifest: Manifest, shape: Shape) -> tuple[_Collected, list[str]]:
        """The sum as it is used, and the devices in it. Raises StatisticsError."""
        if not total.vectors:
            found = sums.from_flat(total.vector, shape)
            bounds.require_possible(found, self._senders(len(total.devices)), manifest.feature_dim)
            if not self._options.clip:
                found.counts[:] = np.round(found.counts)  # masked numbers have an error of up to 10^-6
            none = np.empty((0, 3), np.int64)
            return _Collected(found, (key_of(total.id),), len(total.devices), none), list(total.devices)
        each = self._possible(total.vectors, manifest, shape)
        if len(each) < self._options.minimum:
            raise StatisticsError(
                f"{len(each)} devices sent statistics that samples can have, {self._options.minimum} needed"
            )
        far = self._far(each, manifest)
        used = [each[name].left_out(classes).flat for name, classes in far.items()]
        far |= {name: np.array([ALL_CLASSES]) for name in total.vectors.keys() - each.keys()}
        key = key_of(total.id)
        listed = [
            (key, left_out_key(total.id, name), label) for name, classes in far.items() for label in classes
        ]
        found = sums.from_flat(np.sum(used, axis=0), shape)
        left_out = np.array(listed, np.int64).reshape(-1, 3)
        return _Collected(found, (key,), len(each), left_out), list(each)

    def _far(self, each: Mapping[str, Statistics], manifest: Manifest) -> dict[str, Labels]:
        """The classes of each device that are left out; none with noise, which hides how far class means are from each other."""
        if self._options.noise_multiplier:
            return dict.fromkeys(each, np.empty(0, np.int64))
        far = dict(zip(each, bounds.far_classes(list(each.values())), strict=True))
        for name, classes in far.items():
            if len(classes):
                titles = ", ".join(manifest.classes[label] for label in classes)
                text = "class statistics of %s: far from those of the other devices, and left out: %s"
                log.warning(text, name, titles, extra={"device": name})
        return far

    def _possible(
        self, vectors: Mapping[str, Doubles], manifest: Manifest, shape: Shape
    ) -> dict[str, Statistics]:
        """The statistics of the devices whose pictures can have them; the others are named, and rejected in the registry."""
        each = {}
        for name, vector in vectors.items():
            try:
                found = sums.from_flat(vector, shape)
                bounds.require_possible(found, self._senders(1, len(vectors)), manifest.feature_dim)
            except StatisticsError as error:
                log.warning("class statistics of %s: %s", name, error, extra={"device": name})
                id = f"{STATISTICS}-{manifest.release}"
                self._server.journal.reject(name, manifest.run_id, 0, id, Failure.STATISTICS, error.message)
                self._server.inbox.counts[Failure.STATISTICS] += 1
            else:
                each[name] = found
        return each

    def _senders(self, devices: int, cohort: int = 0) -> Senders:
        """`devices` in a sum of a `cohort`, by default of themselves; every device adds noise as if only the threshold remained."""
        options = self._options
        least = max(options.threshold * (cohort or devices), 1.0)
        noise = options.noise_multiplier * options.clip * np.sqrt(devices / least)
        return Senders(devices, options.clip, float(noise))

    def _record(self, release: int, collected: _Collected, names: list[str], total: Sum) -> RunSum:
        bytes_each = len(total.vector) * fixed_point.BYTES
        pictures = max(round(float(np.sum(collected.found.counts))), 0)
        return RunSum(release, tuple(names), bytes_each, self._masked, pictures, total.epsilon)

    def _earlier(self, rollout: RolloutCoordinator, manifest: Manifest, shape: Shape) -> _Collected | None:
        """The sum of earlier runs on the same extractor, unless it is without noise and the devices in it cannot have sent it.

        Raises StatisticsError if no sum for the present classes can be added to it.
        """
        if (payload := rollout.earlier_extra(PRIOR, manifest)) is None:
            return None
        arrays = tensors.unpack(payload)[PRIOR]
        found = sums.from_arrays(arrays)
        added, left_out = arrays.get(ADDED, np.empty(0)), arrays.get(LEFT_OUT, np.empty((0, 3), np.int64))
        devices = int(arrays.get(DEVICES, np.zeros(1)).sum())
        try:
            if (found.counts == np.round(found.counts)).all():
                bounds.require_possible(found, Senders(devices), manifest.feature_dim)
        except StatisticsError as error:
            log.warning("class statistics of earlier releases: %s", error)
            return None
        if len(added) >= MOST_SUMS:
            raise StatisticsError(
                f"{len(added)} sums for this extractor, no more can be listed", "the earlier prior stays"
            )
        survivals = arrays.get(sums.SURVIVALS, NO_SURVIVALS).astype(np.float64)
        return _Collected(found.resized(shape), tuple(added.tolist()), devices, left_out, survivals)


def _collectable(rollout: RolloutCoordinator) -> Manifest:
    """The release to collect on. Raises StatisticsError if there is none now."""
    manifest, stages = rollout.current, rollout.stages
    if manifest is None or stages is None:
        raise StatisticsError("no release is in use", "nothing was requested")
    if stages.gated and not stages.over:
        raise StatisticsError(
            f"release {stages.release} is {stages.state} in stage {stages.stage + 1}", "nothing was requested"
        )
    return manifest


def _joined(one: RunSum, other: RunSum) -> RunSum:
    """The record of two groups' sums on one release."""
    devices, pictures = (*one.devices, *other.devices), one.pictures + other.pictures
    return replace(one, devices=devices, pictures=pictures)


def summary(found: RunSum, current: Manifest | None) -> str:
    """A line for the operator about a sum that was collected."""
    if not found.pictures:
        known = f"; release {current.release} says so" if current else ""
        return f"how probable labels were to the heads of {len(found.devices)} devices is known{known}"
    return (
        f"class statistics: {found.pictures} samples of {len(found.devices)} devices"
        + (f", epsilon {found.epsilon:.3g}" if found.epsilon else "")
        + (f"; release {current.release} has their prior" if current else "")
    )


def settings_of(recipe: Recipe, method: Method) -> StatisticsConfig:
    """The recipe's `[statistics]`, with what "auto" means for its method and identity. Raises ConfigError if it cannot be carried out."""
    config, identity = recipe.statistics, recipe.broker.identity
    usable = bool(method.exports) and method.head_tier.way in WAYS and not tiers.fleets_head(method.head_tier)
    private = (
        bool(method.privacy.noise_multiplier) and not config.noise_multiplier
    )  # what the run says of epsilon stays true
    config = with_auto(config, bool(identity) and usable and not private)
    if config.sums == "none":
        return config
    if not usable:
        raise ConfigError(
            f"[statistics] sums = {config.sums!r}: {method.title} shares a head or no extractor, so no prior is used;"
            " expected 'auto' or 'none'"
        )
    if (config.sums == "masked") != bool(identity):
        raise ConfigError(
            f"[statistics] sums = {config.sums!r} {'with' if identity else 'without'} an identity of the server: expected"
            f" {'masked: devices with certificates send nothing else' if identity else 'plain, or certificates for masked sums'}"
        )
    _options(config)
    return config


def is_as_broadcast(
    method: Method, broadcast: Parts, exported: Parts, clients: Iterable[str], shape: Sequence[int]
) -> bool:
    """Whether each client that received shared parts as `broadcast` computes the features of those that are `exported`.

    It does not if the server changed them afterwards, or if a part of them stays on the clients.
    """
    if norm.kept(method, "extractor"):
        return False
    place = next((weights.device for weights in exported["extractor"].values()), None)  # it may have none
    x = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(place)
    with torch.inference_mode():
        expected = steps.exported_features(method, exported, x)
        return all(
            torch.equal(
                steps.exported_features(method, steps.broadcast(method, broadcast, client), x), expected
            )
            for client in clients
        )


def with_auto(config: StatisticsConfig, masked: bool) -> StatisticsConfig:
    """The settings with "auto" replaced: masked sums where they are possible, otherwise none."""
    if config.sums != "auto":
        return config
    return replace(config, sums="masked" if masked else "none")


def _options(config: StatisticsConfig) -> SumOptions:
    return SumOptions(
        minimum=config.minimum,
        masked=config.sums == "masked",
        clip=config.clip,
        noise_multiplier=config.noise_multiplier,
    )
