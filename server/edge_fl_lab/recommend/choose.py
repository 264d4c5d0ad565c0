"""Rank methods by the evidence whose federations are most similar to the user's.

The distance of a setting is the sum of |log2| of the two ratios of clients and of samples. The settings used are those at most half a
doubling farther than the nearest one, and at least `FEWEST`.

The recommended method is not the one with the best mean, which may be due to one dataset, but the one with the smallest loss in its worst
federations: the mean, over the worst quarter of the federations, of how far it stays behind the best method there. Methods that diverged
in any of them do not qualify.
"""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl_lab.recommend.evidence import FINE_TUNED, LOCAL, PIXELS, FederationSetting, StudyEvidence, Tier

FEWEST = 4
MARGIN = 0.5  # doublings
WORST = 0.25  # share of the federations


class FederationDifference(Struct, frozen=True):
    """Mean of paired differences in points, with its 95 % interval over `federations`."""

    mean: float
    low: float
    high: float
    federations: int


class RankedMethod(Struct, frozen=True):
    """A method: mean accuracy in per cent, loss in its worst federations, differences to both references, diverged runs."""

    method: str
    accuracy: float
    worst_loss: float
    to_local: FederationDifference | None
    to_fine_tuned: FederationDifference | None
    diverged: int


class Recommendation(Struct, frozen=True):
    """The method to start with, and what it rests on. `rows` are sorted by `worst_loss`; `best_mean` has the highest mean.

    `doublings` is the distance of the nearest setting, `chosen` are the method's tuned values by dataset.
    """

    method: str
    best_mean: str
    tier: Tier
    clients: int
    samples: int
    rows: list[RankedMethod]
    settings: list[FederationSetting]
    federations: int
    evaluated_clients: int
    doublings: float
    notes: list[str]
    chosen: dict[str, str]
    budget: str
    commit: str


def recommend(evidence: StudyEvidence, tier: Tier, clients: int, samples: int) -> Recommendation:
    """Rank the methods for a fleet with `clients` full devices and `samples` training images each."""
    distances = [_distance(setting, clients, samples) for setting in evidence.settings]
    limit = max(min(distances) + MARGIN, sorted(distances)[min(FEWEST, len(distances)) - 1])
    used = [row for row, distance in enumerate(distances) if distance <= limit]
    settings = [evidence.settings[row] for row in used]
    found = {name: _values(table, used) for name, table in evidence.of(tier).items()}
    rows = ranked(found, LOCAL if tier == "full" else PIXELS)
    candidates = [row for row in rows if not row.diverged and row.method not in (LOCAL, PIXELS)]
    seeds = [len(evidence.of(tier)[FINE_TUNED][row]) for row in used]
    each = [setting.clients if tier == "full" else setting.head_only for setting in settings]
    return Recommendation(
        method=candidates[0].method,
        best_mean=max(candidates, key=lambda row: row.accuracy).method,
        tier=tier,
        clients=clients,
        samples=samples,
        rows=rows,
        settings=settings,
        federations=sum(seeds),
        evaluated_clients=sum(map(mul, each, seeds)),
        doublings=round(min(distances), 2),
        notes=[*_out_of_range(evidence, clients, samples), *_references_ahead(rows, candidates[0])],
        chosen=evidence.chosen[candidates[0].method],
        budget=evidence.budget,
        commit=evidence.commit,
    )


def ranked(found: dict[str, np.ndarray], local: str) -> list[RankedMethod]:
    """The methods with their accuracies per federation (NaN: diverged), smallest worst loss first."""
    best = np.nanmax(np.stack(list(found.values())), axis=0)
    rows = []
    for name, values in found.items():
        losses = np.sort(best - np.nan_to_num(values))[::-1]
        worst = losses[: max(1, math.ceil(WORST * len(losses)))]
        rows.append(
            RankedMethod(
                name,
                float(np.nanmean(values)) if np.isfinite(values).any() else math.nan,
                float(worst.mean()),
                difference(values, found[local]) if name != local else None,
                difference(values, found[FINE_TUNED]) if name != FINE_TUNED else None,
                int(np.isnan(values).sum()),
            )
        )
    return sorted(rows, key=lambda row: row.worst_loss)


def difference(ours: np.ndarray, theirs: np.ndarray) -> FederationDifference | None:
    """Student's t interval of the paired differences of federations; None with fewer than two pairs."""
    pairs = (ours - theirs)[np.isfinite(ours - theirs)]
    if len(pairs) < 2:
        return None
    low, high = metrics.interval(pairs.tolist())
    return FederationDifference(float(pairs.mean()), low, high, len(pairs))


def _distance(setting: FederationSetting, clients: int, samples: int) -> float:
    return abs(math.log2(clients / setting.clients)) + abs(math.log2(samples / setting.samples))


def _references_ahead(rows: Sequence[RankedMethod], chosen: RankedMethod) -> list[str]:
    return [
        f"{row.method}, which needs no federated training, loses less there ({row.worst_loss:.1f} points)"
        for row in rows
        if row.method in (LOCAL, PIXELS) and row.worst_loss < chosen.worst_loss
    ]


def _values(table: Sequence[Sequence[float | None]], rows: Sequence[int]) -> np.ndarray:
    return np.array([math.nan if value is None else value for row in rows for value in table[row]], float)


def _out_of_range(evidence: StudyEvidence, clients: int, samples: int) -> list[str]:
    counts = [setting.clients for setting in evidence.settings]
    sizes = [round(setting.samples) for setting in evidence.settings]
    return [
        f"the evidence has {min(known)} to {max(known)} {what}; nearest used for {asked}"
        for what, asked, known in (
            ("clients that train", clients, counts),
            ("training images per client", samples, sizes),
        )
        if not min(known) <= asked <= max(known)
    ]
