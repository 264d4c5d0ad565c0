"""Compare every method that edge-fl and PFLlib both implement, image by image, round by round.

    python -m tests.differential.pfllib CHECKOUT [--methods fedrep,ditto] [--reasons]

Both sides get the same images of six clients, the same initial weights, one batch per client, SGD with learning rate 0.1, two local epochs
and five rounds. A method is equal if after every round both sides predict the same test images correctly. Where PFLlib has a fault or
differs on purpose, it is compared as published and once more after the changes in `tests.differential.changes`; then equality after the
changes counts. Exit code: 0 if every method is equal, 1 if one is not, 2 for a wrong argument.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edge_fl.errors import InputError
from tests.differential import theirs
from tests.differential.cases import CASES, Case
from tests.differential.changes import Change
from tests.differential.ours import Hits, Ours


@dataclass(frozen=True)
class Outcome:
    """Which test images are predicted correctly after each round: by edge-fl, by PFLlib, and by PFLlib after the changes (if any)."""

    case: Case
    ours: Hits
    published: Hits
    changed: Hits | None

    @property
    def equal(self) -> bool:
        """Whether both sides agree in every image of every round, after the changes if there are any."""
        return different(self.ours, self.published if self.changed is None else self.changed) == 0

    def lines(self) -> list[str]:
        """The verdict, then the correct predictions per round of each side, the same ones once."""
        found, scope = (
            different(self.ours, self.published),
            f"{len(self.ours)} rounds x {len(self.ours[0])} test images",
        )
        verdict = "differs" if found else "equal"
        if self.changed is not None:
            change = "repaired" if self.case.faults else "aligned"
            verdict += f", {change}: {'equal' if self.equal else 'differs'}"
        lines = [f"{self.case.title:<11} {verdict:<24} {scope}", _counts("edge-fl", self.ours)]
        if found:
            lines.append(_counts("PFLlib", self.published))
        if self.changed is not None and not self.equal:
            lines.append(_counts(f"PFLlib, {change}", self.changed))
        return lines


def different(a: Hits, b: Hits) -> int:
    """In how many images of all rounds two sides differ: one predicts them correctly, the other does not."""
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))


def compare(case: Case) -> Outcome:
    """Run a method on both sides; PFLlib must be loaded."""
    ours = Ours(case.ours)
    changed = _changed(case, ours, case.changes) if case.changes else None
    return Outcome(case, ours.hits(), theirs.run(case.theirs, ours)[1:], changed)


def reasons(outcome: Outcome) -> list[str]:
    """For each change, in how many images the sides differ without it."""
    case, ours, lines = outcome.case, Ours(outcome.case.ours), []
    for change in case.changes:
        others = [other for other in case.changes if other is not change]
        without = different(outcome.ours, _changed(case, ours, others))
        lines.append(f"    {without:4d} different without: {change.__doc__}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run the comparison and write its outcome. Returns the exit code."""
    known = list(dict.fromkeys(case.name for case in CASES))
    names = ",".join(known)
    parser = argparse.ArgumentParser(prog="python -m tests.differential.pfllib")
    parser.add_argument("checkout", type=Path, help="folder of a checkout of PFLlib, with system/flcore")
    parser.add_argument(
        "--methods", default=names, help="names in edge-fl, separated by commas; default: all"
    )
    parser.add_argument("--reasons", action="store_true", help="also without each change of PFLlib")
    parsed = parser.parse_args(arguments)
    methods = parsed.methods.split(",")
    if unknown := [name for name in methods if name not in known]:
        parser.error(f"--methods: {unknown[0]!r}, expected some of {names}")
    try:
        chosen = [case for name in methods for case in CASES if case.name == name]
        theirs.load(parsed.checkout, [case.theirs for case in chosen])
    except InputError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    _write(f"PFLlib {commit(parsed.checkout)}; correct predictions after each round")
    differing = []
    for case in chosen:
        outcome = compare(case)
        for line in [*outcome.lines(), *(reasons(outcome) if parsed.reasons else [])]:
            _write(line)
        if not outcome.equal:
            differing.append(case.title)
    _write(f"{len(chosen) - len(differing)} of {len(chosen)} comparisons are equal")
    if differing:
        _write(f"not equal: {', '.join(differing)}")
    return 1 if differing else 0


def commit(checkout: Path) -> str:
    """The checkout's commit, or "(unknown commit)" without a git folder."""
    unknown = "(unknown commit)"
    if not (checkout / ".git").exists():
        return unknown
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or unknown


def _changed(case: Case, ours: Ours, changes: Sequence[Change]) -> Hits:
    found = theirs.run(case.theirs, ours, changes)
    first = case.first if changes else 1
    return found[first : first + len(found) - 1]


def _counts(side: str, hits: Hits) -> str:
    return f"    {side:<17}{' '.join(f'{int(each.sum()):3d}' for each in hits)}"


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
