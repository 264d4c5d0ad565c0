"""CONTRIBUTING.md: ten typical changes, each with the files that it touches, and every one of these files exists."""

import re
from pathlib import Path

import pytest

from tests.links import broken_links

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
CHANGES = dict(
    re.findall(
        r"^### (.+)\n((?:(?!^##).*\n)+)", PAGE.read_text().partition("## Ten typical")[2] + "\n", re.MULTILINE
    )
)
FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|json|toml|yml))`")


def files(text: str) -> list[str]:
    return FILE.findall(text)


def test_there_are_ten_changes() -> None:
    assert len(CHANGES) == 10
    assert all(files(text) for text in CHANGES.values())


@pytest.mark.parametrize("change", CHANGES)
def test_the_files_that_a_change_touches_exist(change: str) -> None:
    named = files(CHANGES[change])
    old = [name for name in named if "NAME" not in name]
    assert not [name for name in old if not (ROOT / name).is_file()]
    new = [name for name in named if "NAME" in name]
    assert not [name for name in new if not (ROOT / name).parent.is_dir()]


@pytest.mark.parametrize("change", CHANGES)
def test_the_names_that_a_change_adds_to_are_in_its_files(change: str) -> None:
    """Such as `METHODS`: a table in capitals, in one of the files of the change."""
    text = "".join((ROOT / name).read_text() for name in files(CHANGES[change]) if "NAME" not in name)
    tables = re.findall(r"`([A-Z_]{4,})`", CHANGES[change])
    assert not [table for table in tables if table != "NAME" and not re.search(rf"\b{table}\b", text)]


def test_links_resolve() -> None:
    assert not broken_links(PAGE)
