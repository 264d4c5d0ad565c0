"""From finished cells to the evidence of `edge-fl methods recommend`, tables of accuracies, and verdicts on the papers' claims."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_fl import metrics
from edge_fl_lab import recommend
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.tuning import Tuning
from edge_fl_lab.recommend import LOCAL, PIXELS, StudyEvidence
from edge_fl_server.runs.summaries import Paired
from tools.study import runs
from tools.study.settings import EPOCHS, METHODS, ROUNDS, TRIALS, Setting
from tools.study.work import Run

Federation = tuple[Setting, int]


@dataclass(frozen=True)
class Claim:
    """A paper's claim: metric `a` is higher than `b`, each (method, metric)."""

    text: str
    a: tuple[str, str]
    b: tuple[str, str]

    @property
    def command(self) -> str:
        """The command that runs all cells of this claim and prints its verdict."""
        return f"python -m tools.study --methods {','.join(dict.fromkeys([self.a[0], self.b[0]]))}"


AFTER, GLOBAL = metrics.PERSONAL_AFTER, metrics.GLOBAL_TEST
CLAIMS = (
    Claim("FedCRC: personal model above FedRep", ("fedcrc", AFTER), ("fedrep", AFTER)),
    Claim("FedCRC: global model above FedAvg", ("fedcrc", GLOBAL), ("fedavg", GLOBAL)),
    Claim("FedCRC: tau 0.99 above 0.5, personal model", ("fedcrc", AFTER), ("fedcrc:tau=0.5", AFTER)),
    Claim("FedCRC: tau 0.99 above 0.5, global model", ("fedcrc", GLOBAL), ("fedcrc:tau=0.5", GLOBAL)),
    Claim("FedCRL above FedProto", ("fedcrl", AFTER), ("fedproto", AFTER)),
    Claim("FedRIR above FedRep", ("fedrir", AFTER), ("fedrep", AFTER)),
    Claim("DualFed: both heads above the personal one", ("dualfed", AFTER), ("dualfed", runs.PERSONAL_HEAD)),
    Claim("DualFed: both heads above the global one", ("dualfed", AFTER), ("dualfed", GLOBAL)),
    Claim("RepPer above FedAvg+FT", ("repper", AFTER), ("fedavg+ft", AFTER)),
)


def mean(result: CellResult, metric: str) -> float:
    """Mean of a metric over the clients that have it, in per cent; NaN if training diverged or there are none."""
    values = [report[metric] for report in result.clients.values() if metric in report]
    return 100 * float(np.nanmean(values)) if values and not result.failure else math.nan


def evidence(
    finished: Sequence[Run], tunings: Mapping[str, Mapping[str, Tuning]], commit: str
) -> StudyEvidence:
    """The evidence, from the federations that all methods have finished."""
    labels = {run.label for run in finished}
    federations = [
        each
        for each in _federations(finished)
        if {run.label for run in finished if (run.setting, run.seed) == each} == labels
    ]
    seeds: dict[Setting, list[int]] = {}
    for setting, seed in federations:
        seeds.setdefault(setting, []).append(seed)
    results = {(run.label, run.setting, run.seed): run.result for run in finished}

    def table(label: str, metric: str) -> list[list[float | None]]:
        values = [
            [mean(results[label, setting, seed], metric) for seed in own] for setting, own in seeds.items()
        ]
        return [[round(v, 2) if math.isfinite(v) else None for v in row] for row in values]

    methods = [label for label in METHODS if label in labels]
    head = {label: table(label, runs.HEAD_ONLY) for label in methods}
    head = {label: rows for label, rows in head.items() if any(v is not None for row in rows for v in row)}
    return StudyEvidence(
        commit,
        f"{ROUNDS} rounds of {EPOCHS} epochs, {TRIALS} trials per method",
        [
            recommend.FederationSetting(s.dataset, s.partition, s.clients, s.head_only, float(s.samples))
            for s in seeds
        ],
        {label: table(label, AFTER) for label in methods},
        {PIXELS: table(LOCAL, runs.PIXELS), **head},
        {
            label: {dataset: _text(found[label]) for dataset, found in tunings.items() if label in found}
            for label in methods
        },
    )


@dataclass(frozen=True)
class Verdict:
    """A claim with its difference over all federations, by dataset and by partition, and the words that follow from these."""

    claim: Claim
    overall: Paired | None
    parts: dict[str, Paired | None]

    @property
    def words(self) -> str:
        """holds: the interval over all federations is above 0; holds only where: that of some datasets or partitions is."""
        if self.overall and self.overall.low > 0:
            against = [name for name, part in self.parts.items() if part and part.high < 0]
            return "holds" + (f", but not on {', '.join(against)}" if against else "")
        where = [name for name, part in self.parts.items() if part and part.low > 0]
        if where:
            return f"holds only on {', '.join(where)}"
        reverse = self.overall and self.overall.high < 0
        return "does not hold: " + ("the reverse does" if reverse else "the interval includes 0")


def verdicts(finished: Sequence[Run]) -> Iterator[Verdict]:
    """Check every claim whose methods have run."""
    results = {(run.label, run.setting, run.seed): run.result for run in finished}
    federations = _federations(finished)
    for claim in CLAIMS:
        pairs = [
            (setting, mean(results[a], claim.a[1]), mean(results[b], claim.b[1]))
            for setting, seed in federations
            if (a := (claim.a[0], setting, seed)) in results and (b := (claim.b[0], setting, seed)) in results
        ]
        if not pairs:
            continue
        groups = dict.fromkeys([s.dataset for s, *_ in pairs] + [s.partition for s, *_ in pairs])
        parts = {
            name: _difference((a, b) for s, a, b in pairs if name in (s.dataset, s.partition))
            for name in groups
        }
        yield Verdict(claim, _difference((a, b) for _, a, b in pairs), parts)


def _difference(pairs: Iterable[tuple[float, float]]) -> Paired | None:
    both = np.array([*pairs], float).reshape(-1, 2)
    return recommend.difference(both[:, 0], both[:, 1])


def _federations(finished: Sequence[Run]) -> list[Federation]:
    return [*dict.fromkeys((run.setting, run.seed) for run in finished)]


def _text(tuning: Tuning) -> str:
    """The chosen values that are not the untuned ones; the learning rate always."""
    changed = {
        name: value for name, value in tuning.chosen.items() if name == "lr" or value != tuning.default[name]
    }
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in changed.items()
    )
