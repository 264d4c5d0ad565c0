"""The table of docs/table-of-methods.md, from the methods' own declarations: `python -m tools.site.methods_table` writes it."""

from pathlib import Path

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl_lab import catalogue

PAGE = Path(__file__).parents[2] / "docs/table-of-methods.md"
BEGIN = "<!-- methods: written by `python -m tools.site.methods_table`, checked by a test -->"
END = "<!-- end of methods -->"


def with_table(text: str) -> str:
    """Replace the table of methods between the two markers of a page."""
    cells = [[row[key] for key in catalogue.COLUMNS] for row in map(catalogue.row, catalogue.BUILT_IN)]
    before, _, rest = text.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables.markdown(Table([*catalogue.COLUMNS.values()], cells))}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
