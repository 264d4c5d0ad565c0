"""The report as a bar chart: each figure with a target as a multiple of it, with a line at the target."""

from pathlib import Path

from edge_fl_lab.report import style
from tools.bench.figures import Figure, Report


def save(report: Report, folder: Path) -> list[Path]:
    """Write bench.pdf, bench.svg and bench.png; nothing if no figure is comparable with a target."""
    shown = [figure for figure in report.figures if figure.target and figure.comparable]
    if not shown:
        return []
    with style.styled():
        picture = style.figure(0.32 * len(shown) + 1.0, 7)
        axes = picture.subplots()
        names = [f"{figure.id}  ({figure.found:.3g}{figure.unit})" for figure in shown]
        colours = [style.COLOURS[0 if figure.verdict == "reached" else 2] for figure in shown]
        axes.barh(names, [reached(figure) for figure in shown], color=colours)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("as a multiple of the target")
        return style.save(picture, folder, "bench")


def reached(figure: Figure) -> float:
    """Multiple of the target; above 1 is better, for upper limits too."""
    return figure.target / max(figure.found, 1e-9) if figure.at_most else figure.found / figure.target
