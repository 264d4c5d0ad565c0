"""User-visible text uses the terms of docs/glossary.md: command-line help, messages, pages, recipes and documentation."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import edge_fl

ROOT = Path(edge_fl.__file__).parents[1]
PACKAGES = ("edge_fl", "broker", "devices", "server")

REPLACED = {
    r"want(s|ed)? (message|topic)|dn/want|\bTaskSpec\b": "assignment, method spec",
    r"\btask(s)?\b(?! of one)": "run, method spec, request or dataset, each by its own name",
    r"\bround question|\basked anew\b": "round request, retry",
    r"\bletters\b": "shared reports",
    r"\bcontributions?\b|\bbeside\b": "head updates; next to",
    r"\bis spent\b|\bbudget spent\b|\btold epsilon\b": "budget exhausted, epsilon spent",
    r"\btransit\b": "update codec",
    r"\bjudg(e|es|ed|ing|e?ments?)\b|\bjury\b|\bjur(ies|ors?)\b": "validation, compare, panel",
    r"\bledger\b": "run totals, privacy budget",
    r"\bmade it\b|\bcould not\b(?= and)": "succeeded, failed",
    r"\bclosing steps?\b": "final personalisation",
    r"\blikeness\b": "CKA similarity",
    r"\bworst tenth\b": "bottom decile",
    r"\bbarred\b": "blocked",
    r"\broll-?out groups?\b|\bin groups\b": "stages",
    r"\bwhoever\b|\bnobody\b|\bsomebody\b|\beverybody\b": "name the client, device or person",
    r"\bsets out\b|\bgives? up for good\b|\bby turns\b|\bhonest names?\b|\bmended\b": "plain technical English",
}
"""Patterns of replaced terms, and what to write instead."""


def documents() -> Iterator[tuple[str, int, str]]:
    """(file, line number, line) of the documentation, the pages' templates and the recipes' comments."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for package in PACKAGES:
        paths += [
            p for p in sorted((ROOT / package).rglob("*")) if p.suffix in {".j2", ".js", ".toml", ".sh"}
        ]
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield str(path.relative_to(ROOT)), number, line


def messages() -> Iterator[tuple[str, int, str]]:
    """(file, line number, text) of every string in the product's code that contains a space, docstrings of commands included."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            if "cli" in path.parts or path.name.endswith("cli.py"):
                prose = set()  # a command's docstring is its help
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) and id(node) not in prose else ""
                if isinstance(text, str) and " " in text:
                    yield str(path.relative_to(ROOT)), node.lineno, text


@cache
def texts() -> list[tuple[str, int, str]]:
    """All of them, for every pattern: parsing the code takes seconds."""
    return [*documents(), *messages()]


@pytest.mark.parametrize("pattern", REPLACED, ids=lambda pattern: REPLACED[pattern])
def test_user_visible_text_avoids_replaced_terms(pattern: str) -> None:
    found = [
        f"{file}:{line}: {text.strip()[:120]!r}"
        for file, line, text in texts()
        if re.search(pattern, text, re.IGNORECASE)
    ]
    assert not found, f"write: {REPLACED[pattern]}\n" + "\n".join(found)


def test_the_search_sees_documents_and_messages() -> None:
    assert any(file == "README.md" for file, _, _ in documents())
    assert any(file.startswith("server/edge_fl_server/cli") for file, _, _ in messages())
    assert re.search(next(iter(REPLACED)), "the dn/want topic")
