"""What a benchmark finds: a figure with its sides, its target, and the proof that the sides computed the same."""

from __future__ import annotations

import statistics

from msgspec import Struct

from tests.bench.measure import Machine, Times

PLAIN = "plain"


class Figure(Struct, frozen=True):
    """One line of the report: how many times as fast as `sides[PLAIN]` the side `ours` is, or any other `value` with its `unit`.

    `difference` is the largest between the two sides' weights (or between their accuracies), at most `tolerance`; otherwise the figure
    is not comparable. `peak` is the share of the machine's GEMM peak that `ours` reached. `notes` says what else was measured.
    """

    id: str
    what: str
    target: float = 0.0  # 0: none
    unit: str = "x"
    at_most: bool = False  # the target is a limit from above
    sides: dict[str, Times] = {}
    ours: str = ""
    value: float | None = None
    difference: float | None = None
    tolerance: float = 1e-5
    peak: float | None = None
    notes: dict[str, float | str] = {}

    @property
    def comparable(self) -> bool:
        """Whether both sides computed the same."""
        return self.difference is None or self.difference <= self.tolerance

    @property
    def ratios(self) -> list[float]:
        """How many times as fast `ours` was in each turn: what disturbs the machine for longer than a turn disturbs both sides."""
        if self.value is not None:
            return []
        pairs = zip(self.sides[PLAIN].clock, self.sides[self.ours].clock, strict=True)
        return [theirs / own for theirs, own in pairs]

    @property
    def found(self) -> float:
        """What is compared with the target: the value, or the middle one of the ratios."""
        return statistics.median(self.ratios) if self.value is None else self.value

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.comparable:
            return "not comparable"
        if not self.target:
            return ""
        reached = self.found <= self.target if self.at_most else self.found >= self.target
        return "reached" if reached else "missed"


class Report(Struct, frozen=True):
    """All figures of a run, and the machine that they were found on."""

    machine: Machine
    figures: list[Figure]
