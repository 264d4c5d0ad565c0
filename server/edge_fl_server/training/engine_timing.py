"""The record of an engine chosen by "auto", for the report and the run's manifest."""

from msgspec import Struct


class EngineTiming(Struct, frozen=True):
    """The engine that "auto" chose, and the measurements behind the choice.

    `seconds`: expected duration of a round by measured engine; `left_out`: the others, with the reason; `reason`: why nothing was measured.
    `cores` are those available, `threads` those of each process, `load` is the load average before.
    """

    engine: str
    cores: int
    threads: int
    load: float
    reason: str = ""
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}

    def __str__(self) -> str:
        """The choice in words: "pool (1.05 s per round; sequential 2.1 s; ...)"."""
        found = [self.reason] if self.reason else []
        if self.engine in self.seconds:
            found.append(f"{_seconds(self.seconds[self.engine])} per round")
        others = sorted((s, name) for name, s in self.seconds.items() if name != self.engine)
        found += [f"{name} {_seconds(seconds)}" for seconds, name in others]
        found += [f"{name} not measured: {why}" for name, why in self.left_out.items()]
        found.append(f"{self.cores} cores, threads per process: {self.threads}, load average {self.load:.1f}")
        return f"{self.engine} ({'; '.join(found)})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
