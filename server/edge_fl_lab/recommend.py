"""Rank methods by the evidence whose federations are most similar to the user's.

The distance of a setting is the sum of |log2| of the two ratios of clients and of samples. The settings used are those at most half a
doubling farther than the nearest one, and at least `FEWEST`.

The recommended method is not the one with the best mean, which may be due to one dataset, but the one with the smallest loss in its worst
federations: the mean, over the worst quarter of the federations, of how far it stays behind the best method there. Methods that diverged
in any of them do not qualify.

The evidence is a study of tuned methods in simulated federations: `python -m tools.study` wrote evidence.json (docs/choosing-a-method.md).
"""

import math
from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.console import units
from edge_fl.console.output import terminal_lines
from edge_fl.console.tables import Table
from edge_fl_server.runs.summaries import Paired

Tier = Literal["full", "head"]
LOCAL, PIXELS, FINE_TUNED = "local", "pixels", "fedavg+ft"
"""The references: no sharing (head-only clients: a head on pixels, without any extractor), and FedAvg with fine-tuning."""

FILE = Path(__file__).with_name("evidence.json")
FEWEST = 4
MARGIN = 0.5  # doublings
WORST = 0.25  # share of the federations
SHOWN = 6
HEADINGS = ["method", "accuracy", "worst loss", "against {local}", "against fedavg+ft", "diverged"]


class FederationSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of federation: `clients` train with `samples` training images each on average, `head_only` further clients do not."""

    dataset: str
    partition: str
    clients: int
    head_only: int
    samples: float


class StudyEvidence(Struct, frozen=True, forbid_unknown_fields=True):
    """Mean accuracy over clients in per cent, by method, setting and seed (equal seeds for all methods); None where training diverged.

    `full` is of the clients that trained, after the final personalisation; `head` of the head-only clients, with a head on the exported
    extractor. `chosen` are each method's tuned values by dataset.
    """

    commit: str
    budget: str
    settings: list[FederationSetting]
    full: dict[str, list[list[float | None]]]
    head: dict[str, list[list[float | None]]]
    chosen: dict[str, dict[str, str]]

    def of(self, tier: Tier) -> Mapping[str, list[list[float | None]]]:
        """The accuracies of a tier."""
        return self.full if tier == "full" else self.head


def load(path: Path = FILE) -> StudyEvidence:
    """Read the evidence that is part of the package, or another file."""
    return msgspec.json.decode(path.read_bytes(), type=StudyEvidence)


class RankedMethod(Struct, frozen=True):
    """A method: mean accuracy in per cent, loss in its worst federations, differences to both references, diverged runs."""

    method: str
    accuracy: float
    worst_loss: float
    to_local: Paired | None
    to_fine_tuned: Paired | None
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


def difference(ours: np.ndarray, theirs: np.ndarray) -> Paired | None:
    """The mean difference of federations, in points as given, with Student's t interval; None with fewer than two pairs."""
    pairs = (ours - theirs)[np.isfinite(ours - theirs)]
    if len(pairs) < 2:
        return None
    low, high = metrics.interval(pairs.tolist())
    return Paired(float(pairs.mean()), low, high, len(pairs))


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


def text(found: Recommendation) -> str:
    """Several lines for a terminal."""
    local = LOCAL if found.tier == "full" else PIXELS
    best = {row.method: row for row in found.rows}[found.best_mean]
    same = "which is also the best mean" if best.method == found.method else f"best mean: {best.method}"
    nearest = ", ".join(
        dict.fromkeys(f"{s.clients} clients with {s.samples:g} images" for s in found.settings)
    )
    headings = [heading.format(local=local) for heading in HEADINGS]
    lines = [
        f"recommended: {found.method}",
        f"why: smallest loss against the best method in the worst quarter of the federations; {same}",
        f"evidence: {found.federations} federations of {', '.join(dict.fromkeys(s.dataset for s in found.settings))}"
        f" ({len(found.settings)} settings of different data or split), {found.evaluated_clients} clients; {nearest}",
        f"distance: {_distance_text(found.doublings)}",
        *(f"note: {note}" for note in found.notes),
        "tuned values: " + "; ".join(f"{name}: {values}" for name, values in found.chosen.items()),
        "",
        *terminal_lines(Table(headings, [_cells(row) for row in _shown(found.rows)], numeric=headings[1:3])),
        "",
        "Differences in points with 95 % intervals over federations;"
        f" {found.budget}; code of {found.commit}.",
    ]
    return "\n".join(lines)


def difference_text(found: Paired | None) -> str:
    """Mean and interval of a difference, such as "+1.2 (-0.3 to +2.7)"."""
    if found is None:
        return units.NOTHING
    mean, low, high = units.difference(found.mean / 100, found.low / 100, found.high / 100)
    return f"{mean} ({low} to {high})"


def _shown(rows: list[RankedMethod]) -> list[RankedMethod]:
    """The first ones, and the references."""
    return [
        row for number, row in enumerate(rows) if number < SHOWN or row.method in (LOCAL, PIXELS, FINE_TUNED)
    ]


def _cells(row: RankedMethod) -> list[str]:
    return [
        row.method,
        units.percent(row.accuracy / 100),
        f"{row.worst_loss:.1f}",
        difference_text(row.to_local),
        difference_text(row.to_fine_tuned),
        str(row.diverged or "-"),
    ]


def _distance_text(doublings: float) -> str:
    if doublings < 0.05:
        return "the evidence has federations of this size"
    return f"{doublings:g} doublings of clients and samples from the nearest federations; 0 is the same size"
