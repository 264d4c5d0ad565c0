"""The specification, docs/methods*.md, agrees with the code: parts, hyper-parameters, device tiers, late updates, numbers, citations."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edge_fl.heads import HEADS
from edge_fl.methods import find, names
from edge_fl.methods.contract.method import Hyper, Method, hypers_of
from edge_fl.methods.finetuned import FineTuned
from edge_fl_lab.catalogue import sample

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("methods*.md"))
FAMILIES = [ROOT / f"docs/methods-{name}.md" for name in ("global", "personal-heads", "personal-models")]
MOST_LINES = 350
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([^`]+)`")


@cache
def sections() -> dict[str, str]:
    """Text under each heading, by the heading in lower case."""
    text = "\n".join(page.read_text() for page in PAGES)
    _, *rest = re.split(r"^#{1,3} (.+)\n", text, flags=re.MULTILINE)
    return {title.lower(): text for title, text in zip(rest[::2], rest[1::2], strict=True)}


def rows(section: str) -> list[list[str]]:
    """Cells of every table row of a section but headings."""
    lines = [line for line in sections()[section].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    headings = {place - 1 for place, row in enumerate(cells) if row[0] == "---"}
    return [row for place, row in enumerate(cells) if place not in headings and row[0] != "---"]


def row_of(section: str, name: str) -> list[str]:
    (row,) = [row for row in rows(section) if row[0].lower() == name]
    return row


def part_names(name: str, kind: str) -> list[str]:
    """Names in the list of shared or personal parts, without the remarks in parentheses."""
    found = re.search(rf"^- \*\*{kind} parts:\*\* (.+(?:\n  .+)*)", sections()[name], re.MULTILINE)
    text, count = found[1] if found else "", 1
    while count:
        text, count = re.subn(r"\([^()]*\)", "", text)
    return CODE.findall(text)


def declared(name: str) -> type[Method]:
    return FineTuned if name.endswith("+ft") else find(name)


def span(default: Any, limits: Hyper) -> str:
    choices = limits.choices or ((False, True) if isinstance(default, bool) else ())
    if choices:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    return f"≥ {limits.low:g}" if limits.high is None else f"{limits.low:g} to {limits.high:g}"


def test_every_method_has_a_section_under_its_title() -> None:
    headings = [
        heading for page in FAMILIES for heading in re.findall(r"^### (.+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(headings) == sorted(sample(name).title for name in names())


@pytest.mark.parametrize("name", names())
def test_parts_are_those_of_the_code(name: str) -> None:
    parts = sample(name).parts
    assert part_names(name, "Shared") == [part for part, spec in parts.items() if spec.travels]
    assert part_names(name, "Personal") == [part for part, spec in parts.items() if not spec.travels]


@pytest.mark.parametrize("name", names())
def test_hyper_parameters_are_those_of_the_code(name: str) -> None:
    assert [tuple(row[:3]) for row in rows(name)] == [
        (f"`{key}`", f"`{json.dumps(default)}`", span(default, limits))
        for key, (default, limits) in hypers_of(declared(name)).items()
    ]


@pytest.mark.parametrize("name", names())
def test_device_tier_and_late_updates_are_those_of_the_code(name: str) -> None:
    method, (_, kind, exported, extras, way, uploads) = sample(name), row_of("device tiers", name)
    tier = method.head_tier
    assert kind == {"none": "not supported"}.get(tier.kind, tier.kind)
    assert tuple(CODE.findall(exported)) == method.exports
    assert tuple(CODE.findall(extras)) == tier.extras
    assert CODE.findall(way) == ([] if tier.kind == "none" else [tier.way])
    assert dict(re.findall(r"`(\w+)`: (\w+)", uploads)) == dict(tier.updates)
    assert row_of("bytes per round", name)[-1] == ("yes" if method.averages() else "no")


@pytest.mark.parametrize("name", names())
def test_the_usual_optimiser_is_that_of_the_code(name: str) -> None:
    usual, stated = (
        declared(name).usual_optimiser,
        re.search(r"\*\*Usual optimiser:\*\* (.+)", sections()[name]),
    )
    assert (stated is None) == (usual is None)
    if stated and usual:
        numbers = dict(re.findall(r"(lr|momentum|weight decay) ([\d.e-]+)", stated[1]))
        assert stated[1].lower().startswith(usual.name)
        assert [float(numbers.get(key, 0)) for key in ("lr", "momentum", "weight decay")] == [
            usual.lr,
            usual.momentum,
            usual.weight_decay,
        ]


@pytest.mark.parametrize("row", rows("numbers that tests check"), ids=lambda row: row[0])
def test_numbers_appear_in_the_linked_tests(row: list[str]) -> None:
    numbers = [value.replace(",", "") for value in CODE.findall(row[2]) if re.fullmatch(r"[-\d.,e]+", value)]
    together = "".join((ROOT / "docs" / target).read_text() for target in LINK.findall(row[3]))
    assert numbers
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", together.replace("_", "")), number


CITATION = re.compile(r"docs/([\w-]+\.md),? (?:\"([^\"\n]+)\"|([FG]\d+)\b)")


def test_every_citation_of_a_page_names_a_heading_or_a_rule_of_it() -> None:
    """As in `docs/methods.md G9` and `docs/devices.md, "Scenes"`, in code, recipes, tests and tools."""
    folders = ("edge_fl", "broker", "devices", "server", "tests", "tools")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")
    ]
    cited = [(path, *found) for path in files for found in CITATION.findall(path.read_text())]
    assert len(cited) > 60
    wrong = [
        f"{path.relative_to(ROOT)}: docs/{page} has no {heading or rule}"
        for path, page, heading, rule in cited
        if not re.search(
            rf"^#+ {re.escape(heading or rule)}{'$' if heading else ' '}", text_of(page), re.MULTILINE
        )
    ]
    assert not wrong, "\n".join(wrong)


@cache
def text_of(page: str) -> str:
    path = ROOT / "docs" / page
    return path.read_text() if path.is_file() else ""


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / "docs").glob("performance*.md")], ids=lambda page: page.name
)
def test_a_page_can_be_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MOST_LINES


def test_every_kind_of_head_is_listed_where_one_is_chosen() -> None:
    (setting,) = re.findall(r"^head = .*", (ROOT / "docs/devices.md").read_text(), re.MULTILINE)
    options = (ROOT / "devices/edge_fl_devices/options.py").read_text()
    (help_text,) = re.findall(r"\"Kind of personal head: .*\"", options)
    table = {row[0].strip("`") for row in rows("heads")}
    for kind in [kind for kind in HEADS if kind != "constant"]:
        assert kind in table and all(re.search(rf"\b{kind}\b", text) for text in (setting, help_text))
