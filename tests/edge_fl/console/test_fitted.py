"""Tables on terminals of any width keep every cell whole: prose is wrapped, columns are left out by rank, or rows become records."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_fl.console import units
from edge_fl.console.tables import Column, Columns, Table, aligned_lines, cell_width, fitted, listing

COLUMNS: Columns = {
    "device": "device",
    "state": "state",
    "after": Column("after", units.percent),
    "machine": Column("machine", rank=2),
    "seen": Column("last seen", rank=1),
    "why": Column("why", prose=True),
}
ROWS = [
    {"device": f"device-{number}", "state": "quarantined", "after": 0.9,
     "machine": " ".join(["aarch64"] * 6), "seen": "2026-11-20 10:15:00",
     "why": "three reports were rejected, the last one because of its norm"} for number in range(2)
]  # fmt: skip
LONG = listing(ROWS, COLUMNS)


def test_a_wide_terminal_shows_one_line_per_row() -> None:
    assert fitted(LONG, 200) == aligned_lines(LONG)
    assert len(aligned_lines(LONG)) == 3


def test_prose_is_wrapped_before_a_column_is_left_out() -> None:
    lines = fitted(LONG, 140)
    assert lines[0].split("  ")[-1] == "why" and len(lines) == 5
    assert (
        lines[1].endswith("three reports were rejected, the last")
        and lines[2].strip() == "one because of its norm"
    )


def test_columns_of_the_highest_rank_are_left_out_first_and_named() -> None:
    lines = fitted(LONG, 100)
    assert "last seen" in lines[0] and "machine" not in lines[0]
    assert lines[-1] == "not shown in this width: machine"


def test_below_100_columns_rows_that_do_not_fit_become_records() -> None:
    assert fitted(LONG, 80)[:4] == [
        "device-0",
        "  state: quarantined   after: 90.0 %",
        "  machine: aarch64 aarch64 aarch64 aarch64 aarch64 aarch64",
        "  last seen: 2026-11-20 10:15:00",
    ]
    assert fitted(LONG, 80, stacked=False)[0].split() == ["device", "state", "after", "why"]


def test_columns_without_a_value_are_left_out_and_numbers_are_right_aligned() -> None:
    rows = [{"name": "a", "n": 7, "why": ""}, {"name": "b", "n": 100, "why": None}]
    assert aligned_lines(listing(rows, {"name": "name", "n": "n", "why": "why"})) == [
        "name    n",
        "a       7",
        "b     100",
    ]


def test_wide_characters_take_two_columns() -> None:
    lines = aligned_lines(Table(["class", "n"], [["犬", "1"], ["cat", "2"]]))
    assert [cell_width(line) for line in lines] == [8, 8, 8] and lines[1] == "犬     1"


WORDS = st.text("abcdefghij-_.é犬", min_size=1, max_size=30)
CELLS = st.lists(WORDS, min_size=0, max_size=12).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.integers(40, 220),
    st.sets(st.integers(1, 5)),
    st.dictionaries(st.integers(1, 5), st.integers(1, 3)),
)
def test_no_word_is_lost_at_any_width(
    rows: list[list[str]], width: int, prose: set[int], ranks: dict[int, int]
) -> None:
    headings = [f"H{place}" for place in range(len(rows[0]))]
    table = Table(
        headings,
        rows,
        prose=[heading for place, heading in enumerate(headings) if place in prose],
        ranks={heading: ranks[place] for place, heading in enumerate(headings) if place in ranks},
    )
    lines = fitted(table, width)
    left_out = lines[-1].partition("not shown in this width: ")[2].split(", ")
    printed = "\n".join(lines).replace(":", " ").split()  # a record is "first: second"
    for row in rows:
        for heading, cell in zip(headings, row, strict=True):
            if heading not in left_out and cell != "-":
                assert all(printed.count(word) >= cell.split().count(word) for word in cell.split())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_an_empty_table_has_its_headings(width: int) -> None:
    assert fitted(listing([], COLUMNS), width) == ["device  state  after  machine  last seen  why"]
