"""The page about the Cyber Resilience Act names every item of Annex I, and only tests and documents that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = re.findall(
    r"^\| (II? \S+) \| (.+?) \| (.+?) \|(.*)\|$", (ROOT / "docs/cyber-resilience-act.md").read_text(), re.M
)
ITEMS = ["I (1)", *(f"I (2)({letter})" for letter in "abcdefghijklm"), *(f"II ({n})" for n in range(1, 9))]


def test_every_item_has_one_row() -> None:
    assert [item for item, *_ in ROWS] == ITEMS


def test_every_row_names_existing_evidence_or_says_not_covered() -> None:
    for item, _, status, evidence in ROWS:
        paths = re.findall(r"`([^`]+)`", evidence)
        assert status.startswith(("covered", "partly", "not covered")), item
        assert bool(paths) != status.startswith("not covered"), item
        assert not [path for path in paths if not (ROOT / path).is_file()], item
