"""How often a state changes that many predictions agree on, and how late it follows a true change, under flicker.

python -m tools.study.consensus        the figures in docs/devices.md, "Consensus"

A share of the predictions, drawn one by one, are of another class. The true class changes every two minutes, for ten hours.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl_maker.consensus import HOUR_S, Consensus, Flips

STAY_S, HOURS = 120, 10.0


class Case(NamedTuple):
    """Predictions per second, the share of wrong ones, and the options --consensus and --for."""

    rate: int
    wrong: float
    given: str
    for_s: float

    @property
    def time_s(self) -> float:
        """The consensus time: that of N predictions, and --for."""
        return int(self.given.partition("/")[2]) / self.rate + self.for_s


CASES = [
    Case(rate, wrong, given, for_s)
    for rate in (1, 5)
    for wrong in (0.1, 0.2)
    for given, for_s in (("3/5", 0), ("6/9", 0), ("3/5", 10))
]


def watched(case: Case, hours: float = HOURS) -> tuple[float, float, list[float]]:
    """Changes per hour of single predictions and of the state, and after how many seconds the state followed each true change; infinite if
    it did not before the next one.
    """
    consensus, raw, stable = Consensus(case.given, case.for_s), Flips(), Flips()
    delays: list[float] = []
    stay, changed_s = STAY_S * case.rate, -1.0
    draws = np.random.default_rng(0).random(int(hours * HOUR_S * case.rate))
    for number, is_wrong in enumerate(draws < case.wrong):
        now_s, true = number / case.rate, number // stay % 2
        if number and number % stay == 0:
            delays += [np.inf] * (changed_s >= 0)
            changed_s = now_s
        label = str(true ^ int(is_wrong))
        consensus.add(label, now_s)
        raw.add(label, now_s)
        stable.add(consensus.state, now_s)
        if changed_s >= 0 and consensus.state == str(true):
            delays.append(now_s - changed_s)
            changed_s = -1.0
    return raw.count / hours, stable.count / hours, delays


def table(cases: Sequence[Case] = CASES, hours: float = HOURS) -> Table:
    """A row for each case."""
    rows = []
    for case in cases:
        raw, stable, delays = watched(case, hours)
        row = [
            f"{case.rate}",
            f"{case.wrong:.0%}",
            case.given,
            f"{case.for_s:g} s",
            f"{raw:,.0f}",
            f"{stable:,.0f}",
        ]
        row += [f"{case.time_s:.1f} s", f"{np.median(delays):.1f} s", f"{max(delays):.1f} s"]
        rows.append([*row, f"{np.mean(np.array(delays) <= case.time_s):.0%}"])
    headings = [
        "predictions per second",
        "wrong",
        "`--consensus`",
        "`--for`",
        "changes per hour",
        "of the state",
    ]
    headings += ["consensus time", "median delay", "longest", "within the consensus time"]
    return Table(headings, rows, "Flicker", [f"{HOUR_S / STAY_S:.0f} true changes per hour"], headings)


def main() -> None:
    """Print the table."""
    sys.stdout.write(tables.markdown(table()) + "\n")


if __name__ == "__main__":
    main()
