"""`make mutation`: change random places of the code, one at a time, and count the changes (mutants) that the tests notice.

cosmic-ray makes the changes, in a copy of the repository; pytest-cov tells which tests run the changed line. A mutant runs these tests, and
then others of its module, up to the first failure: those named after its module first, then the shortest first, for at most `--seconds` of
their usual time.
Results go to build/mutation.json; `--again` tests its survivors again, after new tests. tools/mutation.md holds figures and the survivors
that no test can notice.
"""

import argparse
import ast
import difflib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import chain, islice, permutations
from pathlib import Path
from typing import Any

import coverage
import pytest
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code, use_mutation

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "edge_fl/learn/**/*.py",
    "edge_fl/methods/**/*.py",
    "edge_fl/release/*.py",
    "devices/edge_fl_devices/agent/*.py",
    "server/edge_fl_server/training/rounds.py",
    "server/edge_fl_server/training/cohorts.py",
    "server/edge_fl_server/release/rollout/gates.py",
    "server/edge_fl_server/release/rollout/stages.py",
    "server/edge_fl_server/mqtt/updates/validation.py",
)
TESTS = (
    "tests/edge_fl/learn",
    "tests/edge_fl/methods",
    "tests/edge_fl/release",
    "tests/devices/agent",
    "tests/server/training",
    "tests/server/mqtt",
    "tests/server/release",
    "tests/server/orchestrate",
    "tests/golden",
    "tests/test_methods_doc.py",
)
DEFAULTS = "tests/test_methods_doc.py"  # compares constants with docs/methods*.md
FAST = "not slow and not timed and not gpu and not arm64 and not browser"
# Imported before the processes of the mutants are forked, so that they start at once.
HEAVY = (
    "torch",
    "torchvision",
    "sklearn.linear_model",
    "onnxruntime",
    "onnxscript",
    "sqlalchemy",
    "tuf.api.metadata",
)
# Of cosmic-ray's replacements of operators; the others, such as + by <<, mostly raise TypeError at once.
OPPOSITE = {"Add": "Sub", "Mul": "Div", "BitOr": "BitAnd", "RShift": "LShift", "Eq": "NotEq", "Is": "IsNot"}
REPLACED = {
    *(f"{a}_{b}" for pair in OPPOSITE.items() for a, b in (pair, pair[::-1])),
    *(f"{a}_{b}" for a, b in permutations(("Lt", "LtE", "Gt", "GtE"), 2)),
    *("FloorDiv_Mul", "Mod_Mul", "Pow_Mul", "USub_UAdd", "UAdd_USub", "Delete_Not"),
}
GUARDS = re.compile(r"\(.*\b(frozen|strict)=True")  # forbid what correct code does not do

RESULTS = ROOT / "build" / "mutation.json"
OUTPUT = Path("pytest.log")
SURVIVED = "survived", "no test"

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change: an operator of cosmic-ray at its nth place in a file."""

    path: Path
    operator: str
    occurrence: int
    line: int

    def diff(self) -> str:
        """The change as a unified diff; empty if the result is not valid Python."""
        before = self.path.read_text()
        after = mutate_code(before, plugins.get_operator(self.operator)(), self.occurrence)
        try:
            ast.parse(after)
        except SyntaxError:
            return ""
        name = str(self.path)
        found = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, n=1, lineterm="")
        return "\n".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Test a random sample of mutants; print each result, the survivors and a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("--mutants", type=int, default=300, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--only", default="*", help="only files that match, such as '*/repper.py'")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files and folders of tests")
    parser.add_argument("--seconds", type=float, default=60, help="usual time of the tests of one mutant")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file for the results (JSON)")
    parser.add_argument("--again", type=Path, help="results of an earlier run: test only its survivors")
    options = parser.parse_args(arguments)
    earlier = json.loads(options.again.read_text()) if options.again else []
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results, file = list[dict[str, Any]](), options.results.resolve()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        enter_copy(Path(folder) / "copy")
        drawn = survivors(earlier) if earlier else draw(random.Random(options.seed), options.only)
        sample = list(islice(drawn, options.mutants))
        print(f"{len(sample)} mutants; first all tests without a mutant", flush=True)
        covered = Covered(options.tests)
        for number, (mutant, diff) in enumerate(sample, 1):
            result, reason = tested(mutant, covered, options.seconds)
            print(
                f"{number:4}  {result:9}  {mutant.path}:{mutant.line}  {mutant.operator}  {reason}",
                flush=True,
            )
            results.append(
                {**asdict(mutant), "path": str(mutant.path), "diff": diff, "result": result, "reason": reason}
            )
            file.write_text(json.dumps(results, indent=1))
    print("\n\n".join(["", *(each["diff"] for each in results if each["result"] in SURVIVED), ""]))
    for result, count in Counter(each["result"] for each in results).most_common():
        print(f"{result:9} {count:4}  {count / len(results):6.1%}")


def enter_copy(copy: Path) -> None:
    """Copy the repository, and let this process and its children import the copy."""
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
        elif not path.name.startswith(".") and path.name not in ("build", "dist", "runs"):
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    os.chdir(copy)
    places = [str(copy / name) for name in ("", "broker", "devices", "server")]
    os.environ.update(PYTHONPATH=os.pathsep.join(places), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [
        *places,
        *(
            entry
            for entry in sys.path
            if not ({(here := Path(entry or ".").resolve()), here.parent} & {ROOT})
        ),
    ]
    del sys.modules["tools"]  # so that the tests of the copy import its own
    for module in HEAVY:
        importlib.import_module(module)


def draw(rng: random.Random, only: str) -> Iterator[tuple[Mutant, str]]:
    """The places of the code that an operator can change, in random order: one mutant of each, and its diff."""
    places: defaultdict[tuple[Path, Position], list[Mutant]] = defaultdict(list)
    for path in sorted(path for pattern in CODE for path in Path().glob(pattern) if fnmatch(str(path), only)):
        for mutant, start in mutants(path):
            places[path, start].append(mutant)
    for place in rng.sample(sorted(places), len(places)):
        mutant = rng.choice(places[place])
        if diff := mutant.diff():
            yield mutant, diff


def survivors(earlier: Sequence[dict[str, Any]]) -> Iterator[tuple[Mutant, str]]:
    """The survivors of an earlier run, found by their diffs, because places move when a file changes."""
    for old in (each for each in earlier if each["result"] in SURVIVED):
        same = [mutant for mutant, _ in mutants(Path(old["path"])) if mutant.operator == old["operator"]]
        same.sort(key=lambda mutant: abs(mutant.occurrence - old["occurrence"]))
        diffs = ((mutant, mutant.diff()) for mutant in same)
        if found := next((pair for pair in diffs if changed(pair[1]) == changed(old["diff"])), None):
            yield found
        else:
            print(f"no longer in the code:\n{old['diff']}")


def changed(diff: str) -> list[str]:
    """The lines that a diff removes and adds."""
    return [line for line in diff.splitlines()[2:] if line.startswith(("+", "-"))]


def mutants(path: Path) -> Iterator[tuple[Mutant, Position]]:
    """All mutants of a file, but for annotations and guards, with their positions."""
    code = path.read_text()
    lines, nodes, unused = code.splitlines(), list(ast_nodes(get_ast(code))), list(annotations(code))
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        replacement = name.partition("Operator_")[2]
        if operator.arguments() or (replacement and replacement not in REPLACED):
            continue
        starts = (start for node in nodes for start, _end in operator().mutation_positions(node))
        for occurrence, start in enumerate(starts):
            guard = name.endswith("TrueWithFalse") and GUARDS.search(lines[start[0] - 1])
            if not guard and not any(first <= start < last for first, last in unused):
                yield Mutant(path, name, occurrence, start[0]), start


def annotations(code: str) -> Iterator[tuple[Position, Position]]:
    """Where annotations begin and end; they are not evaluated."""
    for node in ast.walk(ast.parse(code)):
        for field in ("annotation", "returns"):
            if part := getattr(node, field, None):
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


class Covered:
    """Which tests run a line, and how long they take, from one run of all tests."""

    def __init__(self, tests: Sequence[str]) -> None:
        folders = sorted({f"--cov={pattern.partition('/*')[0]}" for pattern in CODE if "*" in pattern})
        modules = [f"--cov={Path(pattern).parent}" for pattern in CODE if "*" not in pattern]
        if run([*tests, "-m", FAST, *folders, *modules, "--cov-context=test", "--cov-report="]) not in (0, 1):
            sys.exit(OUTPUT.read_text())
        seconds, failed = json.loads(Path("durations.json").read_text())
        for test in failed:
            print(f"not used, because it fails without a mutant: {test}")
        self.seconds = {test: took for test, took in seconds.items() if test not in failed}
        self.data = coverage.CoverageData()
        self.data.read()

    def tests(self, mutant: Mutant, limit: float) -> Iterator[str]:
        """The tests that run the mutant's line, then others that run its module: results are cached, and some lines run on import.

        For the latter also DEFAULTS, and in a module of declarations the tests of its folder.
        """
        file = mutant.path.resolve()
        first = _named(self.data.contexts_by_lineno(str(file)).get(mutant.line, []))
        tests = first | self._running(str(file))
        if not first:
            folder = (other for other in self.data.measured_files() if Path(other).parent == file.parent)
            tests = tests or self._running(*folder)
            tests |= {test for test in self.seconds if test.startswith(DEFAULTS)}

        def order(test: str) -> tuple[object, ...]:
            return test not in first, mutant.path.stem not in test, self.seconds[test], test

        spent = 0.0
        for test in sorted(tests & self.seconds.keys(), key=order):
            if spent == 0.0 or spent + self.seconds[test] <= limit:
                spent += self.seconds[test]
                yield test

    def _running(self, *files: str) -> set[str]:
        return set().union(*(_named(chain(*self.data.contexts_by_lineno(file).values())) for file in files))


def _named(contexts: Iterable[str]) -> set[str]:
    """The tests of coverage contexts such as "test.py::test_one|run"; that of imports is empty."""
    return {context.rpartition("|")[0] for context in contexts if context}


def tested(mutant: Mutant, covered: Covered, seconds: float) -> tuple[str, str]:
    """The verdict of the tests on one mutant, and the failed test or the error."""
    tests = list(covered.tests(mutant, seconds))
    if not tests:
        return "no test", ""
    limit = 30 + 5 * sum(covered.seconds[test] for test in tests)
    with use_mutation(mutant.path, plugins.get_operator(mutant.operator)(), mutant.occurrence):
        status = run(["-x", *tests], limit)
        if status == pytest.ExitCode.USAGE_ERROR:  # the parameters of a test depend on the mutant
            status = run(["-x", *dict.fromkeys(test.partition("[")[0] for test in tests)], limit)
    if status is None:
        return "timed out", f"after {limit:.0f} s"
    if status == 0:
        return "survived", f"{len(tests)} tests"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", OUTPUT.read_text(errors="replace"), re.M)
    return "killed", failed[1] if failed else f"exit status {status}"


def run(arguments: Sequence[str], limit: float | None = None) -> int | None:
    """The exit status of pytest in a forked process; None if it was ended after `limit` seconds."""
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(arguments,))
    process.start()
    process.join(limit)
    status = process.exitcode
    with suppress(ProcessLookupError):  # also what the tests started and left
        os.killpg(process.ident or 0, signal.SIGKILL)
    process.join()
    return status


def _pytest(arguments: Sequence[str]) -> None:
    os.setsid()
    with OUTPUT.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[Durations()])
    sys.stdout.flush()
    os._exit(status)  # sys.exit would wait for pools of processes that are still open


class Durations:
    """Write the duration of each test, and the failed tests, to durations.json."""

    def __init__(self) -> None:
        self.seconds, self.failed = Counter[str](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # of set-up, call and tear-down
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        Path("durations.json").write_text(json.dumps([self.seconds, sorted(self.failed)]))


if __name__ == "__main__":
    main()
