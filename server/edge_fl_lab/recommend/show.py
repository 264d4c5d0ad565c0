"""A recommendation as text: the method, why, what it rests on, and how its rivals and both references did."""

from edge_fl.console import units
from edge_fl.console.output import terminal_lines
from edge_fl.console.tables import Table
from edge_fl_lab.recommend.choose import FederationDifference, RankedMethod, Recommendation
from edge_fl_lab.recommend.evidence import FINE_TUNED, LOCAL, PIXELS

SHOWN = 6
HEADINGS = ["method", "accuracy", "worst loss", "against {local}", "against fedavg+ft", "diverged"]


def text(found: Recommendation) -> str:
    """Several lines for a terminal."""
    local = LOCAL if found.tier == "full" else PIXELS
    best = {row.method: row for row in found.rows}[found.best_mean]
    same = "which is also the best mean" if best.method == found.method else f"best mean: {best.method}"
    nearest = ", ".join(
        dict.fromkeys(f"{s.clients} clients with {s.samples:g} images" for s in found.settings)
    )
    headings = [heading.format(local=local) for heading in HEADINGS]
    lines = [
        f"recommended: {found.method}",
        f"why: smallest loss against the best method in the worst quarter of the federations; {same}",
        f"evidence: {found.federations} federations of {', '.join(dict.fromkeys(s.dataset for s in found.settings))}"
        f" ({len(found.settings)} settings of different data or split), {found.evaluated_clients} clients; {nearest}",
        f"distance: {_distance(found.doublings)}",
        *(f"note: {note}" for note in found.notes),
        "tuned values: " + "; ".join(f"{name}: {values}" for name, values in found.chosen.items()),
        "",
        *terminal_lines(Table(headings, [_cells(row) for row in _shown(found.rows)], numeric=headings[1:3])),
        "",
        "Differences in points with 95 % intervals over federations;"
        f" {found.budget}; code of {found.commit}.",
    ]
    return "\n".join(lines)


def difference_text(found: FederationDifference | None) -> str:
    """Mean and interval of a difference, such as "+1.2 (-0.3 to +2.7)"."""
    return "-" if found is None else f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def _shown(rows: list[RankedMethod]) -> list[RankedMethod]:
    """The first ones, and the references."""
    return [
        row for number, row in enumerate(rows) if number < SHOWN or row.method in (LOCAL, PIXELS, FINE_TUNED)
    ]


def _cells(row: RankedMethod) -> list[str]:
    return [
        row.method,
        units.percent(row.accuracy / 100),
        f"{row.worst_loss:.1f}",
        difference_text(row.to_local),
        difference_text(row.to_fine_tuned),
        str(row.diverged or "-"),
    ]


def _distance(doublings: float) -> str:
    if doublings < 0.05:
        return "the evidence has federations of this size"
    return f"{doublings:g} doublings of clients and samples from the nearest federations; 0 is the same size"
