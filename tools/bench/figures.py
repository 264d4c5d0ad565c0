"""Results of a benchmark: figures with their sides, target, and the difference between the sides' results."""

import statistics

from msgspec import Struct

from tools.bench.measure import Machine, Times

PLAIN = "plain"


class Figure(Struct, frozen=True):
    """One line of the report: the speedup of the side `ours` over the side `theirs`, or another `value` with its `unit`.

    `difference` is the largest difference between the two sides' weights (or accuracies); above `tolerance` the figure is not comparable.
    `peak` is the share of the machine's GEMM peak that `ours` reached. `notes` holds further measurements.
    """

    id: str
    what: str
    target: float = 0.0  # 0: none
    unit: str = "x"
    at_most: bool = False  # the target is an upper limit
    sides: dict[str, Times] = {}
    ours: str = ""
    theirs: str = PLAIN
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
        """Speedup in each turn; a disturbance longer than a turn affects both sides."""
        if self.value is not None:
            return []
        pairs = zip(self.sides[self.theirs].clock, self.sides[self.ours].clock, strict=True)
        return [plain / ours for plain, ours in pairs]

    @property
    def found(self) -> float:
        """The number compared with the target: the value, or the median ratio."""
        return statistics.median(self.ratios) if self.value is None else self.value

    @property
    def verdict(self) -> str:
        if not self.comparable:
            return "not comparable"
        if not self.target:
            return ""
        reached = self.found <= self.target if self.at_most else self.found >= self.target
        return "reached" if reached else "missed"


class Report(Struct, frozen=True):
    """All figures of a run, the machine, and a remark on the whole run, if any."""

    machine: Machine
    figures: list[Figure]
    remark: str = ""
