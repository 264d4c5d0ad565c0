"""The failure words are defined once, in edge_fl/failures.py: no literal of one elsewhere, and docs/failure-words.md shows the table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge_fl
from edge_fl.errors import ArtefactError
from edge_fl.failures import SIGNATURE, Failure
from edge_fl.wire.messages import DeviceState, decode, encode

ROOT = Path(edge_fl.__file__).parents[1]
PAGE = ROOT / "docs" / "failure-words.md"
TABLE = ROOT / "edge_fl" / "failures.py"
LAUNCHER = ROOT / "devices" / "edge_fl_devices" / "agent_update" / "launcher.py"  # imports Python only
RETRYING = ("download", "disk", "signed metadata", "message", "release", "computation", "agent update")
"""What a device may try again: the page says of these words whether it does."""
ORDINARY = frozenset(
    "blocked budget budget_exhausted busy compression deadline disk diverged downgrade drift error expired extractor fixed invalid lost"
    " metrics missing nothing off outlier parts privacy rejected rollback samples statistics truncated unknown used withdrawn".split()
)
"""Words that are also other things (a part, a column, a state): a literal of one is forbidden only where a failure word is expected."""
PLACES = frozenset({"why", "reason", "error"})
"""Names of attributes, parameters and variables that hold a failure word."""
RAISED = re.compile(
    r"(Artefact|Trust|SecureSum|Forged|Rejected|RequestRejected)Error|Failed|Rejection|returned"
)


def literals(source: str) -> Iterator[tuple[int, str]]:
    """(line, word) of the literals that should be members of Failure."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        word = (
            Failure.of(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
        )
        if word and (word not in ORDINARY or _is_expected(node, parents)):
            yield node.lineno, word


def _is_expected(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether the literal is raised, passed or compared as a failure word."""
    around = parents[node]
    while isinstance(around, ast.IfExp | ast.BoolOp | ast.Tuple | ast.Set | ast.List):
        around = parents[around]
    match around:
        case ast.keyword(arg=name):
            return name in PLACES
        case ast.Compare():
            names = {
                n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in ast.walk(around)
            }
            return bool(names & PLACES)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name in PLACES
        case ast.Call(func=function):
            return bool(RAISED.fullmatch(ast.unparse(function).rpartition(".")[2]))
    return False


def test_no_failure_word_is_written_outside_the_table() -> None:
    found = {}
    for package in ("edge_fl", "broker", "devices", "server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path not in (TABLE, LAUNCHER) and (here := list(literals(path.read_text()))):
                found[str(path.relative_to(ROOT))] = here
    assert not found, "write Failure.WORD instead"


@pytest.mark.parametrize(
    "line",
    [
        "raise ArtefactError('x', 'disk')",
        "return events.Failed('error')",
        "context.update(why='deadline' if late else '')",
        "if error.why in ('', 'rejected'): pass",
        "state = 'chunk_hash'",
        "why = 'missing'",
    ],
)
def test_a_planted_literal_is_found(line: str) -> None:
    assert list(literals(line))


@pytest.mark.parametrize("line", ["parts['extractor']", "status == 'lost'", "x = ', '.join(y) or 'nothing'"])
def test_an_ordinary_word_is_not_a_failure_word(line: str) -> None:
    assert not list(literals(line))


def test_the_launcher_knows_only_words_of_the_table() -> None:
    stated = re.findall(r'(?:why = |returned\(state, )"(\w+)"', LAUNCHER.read_text())
    assert len(stated) == 4 and set(stated) == {word for _, word in literals(LAUNCHER.read_text())}


def test_a_word_has_a_meaning_and_crosses_the_wire_as_text() -> None:
    for word in Failure:
        assert word.stated or word.rejection
        assert Failure.of(str(word)) is word and f"{word}" == word.value == word.name.lower()
        assert decode(encode(DeviceState("alert", "boot", why=word)), DeviceState).why == word
    assert Failure.of("a word of a later version") is None
    assert ArtefactError("x").why is None


def test_only_what_cannot_succeed_again_is_final() -> None:
    assert {
        word for word in Failure if word.final and word.stated and word.stated.subject != "agent update"
    } == {
        Failure.CANARY_FAILED,
        Failure.UNSUPPORTED_OPSET,
        Failure.WORSE,
        Failure.BLOCKED,
        Failure.REJECTED,
        Failure.NO_DATA,
        Failure.NO_LABELS,
        Failure.BUDGET_EXHAUSTED,
        Failure.DIVERGED,
        Failure.UNSUPPORTED_TIER,
    }
    assert not any(word.rejection and word.rejection.counts for word in SIGNATURE)


def tables() -> str:
    """The generated part of the page."""
    subjects = dict.fromkeys(word.stated.subject for word in Failure if word.stated)
    lines: list[str] = []
    for subject in subjects:
        retries = subject in RETRYING
        lines += [f"## Of a device: {subject}", ""]
        lines += ["| word | meaning | remedy |" + (" tried again |" if retries else "")]
        lines += ["| --- | --- | --- |" + (" --- |" if retries else "")]
        for word in Failure:
            if (stated := word.stated) and stated.subject == subject:
                again = (" no |" if word.final else " yes |") if retries else ""
                lines.append(f"| `{word}` | {_prose(stated.meaning)} | {_prose(stated.remedy)} |{again}")
        lines.append("")
    lines += ["## Of a server: rejections", ""]
    lines += ["| word | meaning | counts towards quarantine |", "| --- | --- | --- |"]
    for word in Failure:
        if rejection := word.rejection:
            lines.append(f"| `{word}` | {rejection.meaning} | {'yes' if rejection.counts else 'no'} |")
    return "\n".join(lines) + "\n"


def _prose(text: str) -> str:
    return re.sub(
        r"(?<![\w`])(edge-fl device doctor|--\w+|\[sums\]|remote_logs|remote_settings|SIG\w+)", r"`\1`", text
    )


def test_the_page_shows_the_table() -> None:
    begin, end = "<!-- the table of edge_fl/failures.py -->\n\n", "\n<!-- its end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    shown, _, after = rest.partition(end)
    assert shown == tables(), f"expected in docs/failure-words.md:\n{before}{begin}{tables()}{end}{after}"
