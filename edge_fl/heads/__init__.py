"""Personal heads: fitted on a client's own features, used with NumPy alone (docs/methods-on-devices.md, "Heads").

To add a head, write one final class and one line in HEADS, or register an entry point of the group `edge_fl.heads` in another package.

A device configured for a linear head (`logistic`, the default, or `cosine`) serves the fleet's head of the release, adapted to its labels
(`served`); for `mlp` and `svm` a residual on it is fitted (`residual`). Without a fleet's head it fits the configured kind on its own
labels, or for `logistic` the method's own head if the release has a plan for one (WAYS), which a release can also ask for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edge_fl import plugins
from edge_fl.errors import ArtefactError, ConfigError, DataError, nearest
from edge_fl.heads import fleet, residual, served
from edge_fl.heads.head import Array, Extras, FittableHead, Head, TrainingSet
from edge_fl.heads.linear import Constant, Cosine, Logistic, Nearest, Svm
from edge_fl.heads.mlp import Mlp
from edge_fl.heads.plan import PLAIN, HeadPlan, Way
from edge_fl.heads.served import Estimate
from edge_fl.heads.tuned import Tuned, mix, ridge, tune
from edge_fl.heads.two_heads import Ensemble, Gated
from edge_fl.untrusted import whole

__all__ = [
    "ENTRY_POINTS",
    "HEADS",
    "KINDS",
    "SERVED",
    "WAYS",
    "Constant",
    "Cosine",
    "Ensemble",
    "FittableHead",
    "Gated",
    "Head",
    "HeadPlan",
    "Logistic",
    "Mlp",
    "Nearest",
    "Svm",
    "Tuned",
    "canonical_order",
    "find",
    "fit",
    "fitted",
    "from_arrays",
    "names",
    "estimated",
    "resolve",
    "training_set",
    "uses_fleet",
]

MAX_CLASSES = 10**6
ENTRY_POINTS = "edge_fl.heads"
HEADS: dict[str, type[FittableHead]] = {
    head.kind: head for head in (Logistic, Svm, Mlp, Nearest, Cosine, Constant)
}
KINDS: dict[str, type[Head]] = {
    **HEADS,
    **{head.kind: head for head in (Tuned, Gated, Ensemble, residual.FleetMlp)},
    **fleet.KINDS,
}
"""All kinds; those not in HEADS need extras of a release."""
SERVED = "served"
"""In the key `heads` of a recipe: the head that a device serves, whatever its kind."""
ADAPTED = {Logistic.kind, Cosine.kind}
"""Kinds in whose place the fleet's head is adapted, if the release has one."""

WAYS: dict[Way, Callable[[TrainingSet], Head]] = {
    "own": Logistic.fit,
    "tuned": lambda data: Tuned.of(data, tune(data)),
    "mixed": lambda data: Tuned.of(data, mix(data)),
    "ridge": lambda data: Tuned.of(data, ridge(data)),
    "gated": Gated.fit,
    "ensemble": Ensemble.fit,
    "cosine": lambda data: (Cosine if len(data.present) > 1 else Constant).fit(data),
}
"""Functions that fit a method's own head."""


def names() -> list[str]:
    """The kinds that can be chosen, those of installed packages included."""
    return list(dict.fromkeys([*HEADS, *plugins.names(ENTRY_POINTS)]))


def find(kind: str) -> type[FittableHead]:
    """Return the class of a kind; also searches the entry point group `edge_fl.heads`. Raises ConfigError."""
    if kind in HEADS:
        return HEADS[kind]
    if found := plugins.registered(ENTRY_POINTS, kind, "head", ConfigError):
        return found  # type: ignore[no-any-return]
    raise ConfigError(f"head {kind!r} is unknown{nearest(kind, names())}")


def resolve(name: str) -> type[FittableHead]:
    """Return the class of a kind or of `package.module:Class`, for commands that a person starts. Raises ConfigError."""
    if ":" not in name:
        return find(name)
    found = plugins.imported(name, "head", ConfigError)
    if not (isinstance(found, type) and issubclass(found, FittableHead) and hasattr(found, "kind")):
        raise ConfigError(
            f"head {name!r}: {found!r}, expected a subclass of edge_fl.heads.FittableHead with a kind"
        )
    return found


def uses_fleet(kind: str, plan: HeadPlan) -> bool:
    """Whether a device that is configured for this kind serves the fleet's head of a release, alone or with a residual."""
    return bool(plan.fleet) and plan.serves == "fleet" and kind in ADAPTED | residual.KINDS.keys()


def fit(kind: str, z: Array, y: Array, classes: int, *, unit_norm: bool, **options: Any) -> Head:
    """Fit a head of this kind on features z [n, d] with class ids y [n] in 0..classes-1; `options` as of `training_set`.

    `extractor` is the sha256 of the extractor of z; `unit_norm` says whether its features have length 1. The order of the samples does not
    matter. Raises as `fitted`, and DataError for unusable features or labels.
    """
    return fitted(kind, training_set(z, y, classes, unit_norm, **options))


def fitted(kind: str, data: TrainingSet) -> Head:
    """Fit a head of this kind; of samples of one class a constant head, unless there is a fleet's head, which needs no samples.

    Raises ConfigError for an unknown kind, ArtefactError for extras that do not fit the plan, DataError without samples for any other head.
    """
    if uses_fleet(kind, data.plan):
        return estimated(kind, data).head
    head = find(kind)
    if not len(data.y):
        raise DataError(
            "head: no labelled samples, and the release has no fleet's head", "no head was fitted"
        )
    if kind == Logistic.kind and data.plan.way != "own":
        return WAYS[data.plan.way](data)
    return (head if len(data.present) > 1 else Constant).fit(data)


def estimated(kind: str, data: TrainingSet) -> Estimate:
    """As `fitted` for a kind that uses the fleet's head, with what would be predicted of each sample without its fold."""
    estimate = served.fit(data)
    return residual.fit(kind, data, estimate) if kind in residual.KINDS else estimate


def training_set(
    z: Array,
    y: Array,
    classes: int,
    unit_norm: bool,
    extractor: str = "",
    seed: int = 0,
    balanced: bool = False,
    plan: HeadPlan = PLAIN,
    extras: Extras | None = None,
    *,
    groups: Array | None = None,
    unlabelled: Array | None = None,
    closed: bool = False,
    importance: Array | None = None,
) -> TrainingSet:
    """The input of `fitted` and `head_updates.compute`: features z [n, d] with class ids y [n] in 0..classes-1, in a canonical order.

    `extractor` is the sha256 of the extractor of z; the others are as of `TrainingSet`. Raises DataError for unusable features or labels.
    """
    z, y = np.asarray(z, np.float32), np.asarray(y)
    _require_fittable(z, y, classes, empty=bool(plan.fleet))
    order = canonical_order(z, y)
    given = np.empty(0, np.int64) if groups is None else np.asarray(groups, np.int64)
    counted = np.empty(0) if importance is None else np.asarray(importance, np.float64)
    return TrainingSet(
        z[order],
        y[order].astype(np.int64),
        classes,
        extractor,
        unit_norm,
        seed,
        balanced,
        plan,
        extras or {},
        given[order] if len(given) else given,
        np.empty((0, z.shape[1]), np.float32) if unlabelled is None else np.asarray(unlabelled, np.float32),
        closed,
        counted[order] if len(counted) else counted,
    )


def canonical_order(z: Array, y: Array) -> list[int]:
    """The order of samples z float32 [n, d] with class ids y [n] in a `training_set`, whatever order they come in."""
    return sorted(
        range(len(y)),
        key=lambda row: (int(y[row]), hashlib.blake2b(z[row].tobytes(), digest_size=16).digest()),
    )


def from_arrays(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Head:
    """Rebuild a head from its `to_arrays()` and `describe()`. Raises ArtefactError for anything else."""
    kind = _known(metadata.get("kind", ""))
    classes = whole(metadata.get("classes", ""), MAX_CLASSES)
    if kind is None or classes is None:
        raise ArtefactError(f"head file: described as {dict(metadata)}, expected kind, classes and extractor")
    if arrays.keys() != kind.shapes.keys():
        raise ArtefactError(f"{kind.kind} head: holds {', '.join(arrays)}, expected {', '.join(kind.shapes)}")
    sizes = {"C": classes, "1": 1}
    for name, letters in kind.shapes.items():
        array = arrays[name]
        expected = np.int64 if name == "present" else np.float32
        if array.dtype != expected or array.ndim != len(letters):
            raise ArtefactError(
                f"{kind.kind} head: {name} is {array.dtype} {list(array.shape)}, expected {expected.__name__} {letters}"
            )
        if any(
            sizes.setdefault(letter, size) != size for letter, size in zip(letters, array.shape, strict=True)
        ):
            raise ArtefactError(
                f"{kind.kind} head: {name} {list(array.shape)} does not fit the other arrays ({sizes})"
            )
        if not np.isfinite(array).all():
            raise ArtefactError(f"{kind.kind} head: {name} holds NaN or infinity")
    present = arrays.get("present", np.empty(0, np.int64))
    if len(present) and (present[0] < 0 or present[-1] >= classes or np.any(np.diff(present) <= 0)):
        raise ArtefactError(
            f"{kind.kind} head: classes {present.tolist()}, expected ascending ids below {classes}"
        )
    return kind.of_arrays(
        classes, metadata.get("extractor", ""), {name: arrays[name] for name in kind.shapes}
    )


def _known(kind: str) -> type[Head] | None:
    try:
        return KINDS[kind] if kind in KINDS else find(kind)
    except ConfigError:
        return None


def _require_fittable(z: Array, y: Array, classes: int, *, empty: bool) -> None:
    flaw = ""
    if z.ndim == 2 and empty and not len(z) and not len(y):
        return
    if z.ndim != 2 or y.shape != z.shape[:1] or not len(y) or y.dtype.kind not in "iu":
        flaw = (
            f"features {list(z.shape)} and {y.dtype} labels {list(y.shape)}, expected [n, d] and n class ids"
        )
    elif y.min() < 0 or y.max() >= classes:
        flaw = f"labels range over {y.min()}..{y.max()}, expected 0..{classes - 1}"
    elif not np.isfinite(z).all():
        flaw = f"{np.sum(~np.isfinite(z).all(axis=1))} of {len(z)} feature rows have NaN or infinity"
    if flaw:
        raise DataError(f"head: {flaw}", "no head was fitted")
