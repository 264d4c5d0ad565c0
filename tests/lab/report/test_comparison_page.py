"""The page of a comparison: one file, a verdict by validation accuracy, paired differences with interval and n."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_fl import cli
from edge_fl.metrics import PERSONAL_AFTER, PERSONAL_VALIDATION_AFTER, Summary
from edge_fl_lab.compare import grid, summary, tables
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell
from edge_fl_lab.report import comparison_page
from edge_fl_server.recipes.recipe import Recipe, with_settings
from tests.browsing import DEADLINE_S

SETTINGS = ["--clients", "3", "--rounds", "2", "--seeds", "2", "--set", "data.fraction=0.2"]
SMALL = [*SETTINGS, "--set", "model.options={feature_dim=8, width=4}"]


def result(cell: Cell, test: float, validation: float) -> CellResult:
    """Clients c0..c3 with accuracies around `test`, a little different with each seed."""
    seed = cell.recipe.seed
    clients = {f"c{n}": {PERSONAL_AFTER: test + n / 100 + seed * (n - 1) / 200} for n in range(4)}
    mean = sum(report[PERSONAL_AFTER] for report in clients.values()) / 4
    last = {
        PERSONAL_AFTER: Summary(mean, mean, 0.1, mean, 4),
        PERSONAL_VALIDATION_AFTER: Summary(validation, validation, 0.1, validation, 4),
    }
    return CellResult(cell.key, cell.label, cell.recipe, last=last, clients=clients)


def block(scores: dict[str, tuple[float, float]], seeds: int = 3) -> comparison_page.Block:
    base = with_settings(Recipe(), ["data.clients=4"])
    cells = grid.cells(base, list(scores), seeds=seeds)
    found = {cell.key: result(cell, *scores.get(cell.label, (0.5, 0.5))) for cell in cells}
    return comparison_page.block(cells, found, cells[0].block)


def test_the_method_is_chosen_by_validation_and_compared_on_the_same_clients() -> None:
    found = block({"fedrep": (0.7, 0.9), "ditto": (0.9, 0.6), "fedavg": (0.6, 0.7)})
    assert found.chosen and found.chosen.method == "fedrep"  # ditto's test accuracy counts for nothing
    assert found.baselines == list(grid.ALWAYS)
    assert comparison_page.verdict(found) == (
        "Of 5 methods fedrep has the highest validation accuracy and classifies 71.7 % of the test samples"
        " (mean over 3 seeds, 12 pairs of client and seed) correctly, +20.0 points compared with local (95 % CI +20.0 to +20.0,"
        " n = 3 seeds), +10.0 points compared with fedavg (95 % CI +10.0 to +10.0, n = 3 seeds), +20.0 points compared with fedavg+ft"
        " (95 % CI +20.0 to +20.0, n = 3 seeds)."
    )


def test_the_table_has_the_same_differences_to_each_baseline() -> None:
    base = with_settings(Recipe(), ["data.clients=4"])
    cells = grid.cells(base, ["fedrep"], seeds=3)
    scores = {"fedrep": (0.7, 0.9), "fedavg": (0.6, 0.7)}
    found = {cell.key: result(cell, *scores.get(cell.label, (0.5, 0.5))) for cell in cells}
    (table,) = tables.tables(summary.rows(cells, found), cells)
    column = {row[0]: row[list(table.headings).index("minus fedavg")] for row in table.rows}
    assert column["fedavg"] == "-" and column["fedrep"] == "+10.00 [+10.00, +10.00]"
    assert [heading for heading in table.headings if "minus" in heading] == [
        f"minus {each}" for each in grid.ALWAYS
    ]
    assert "over 3 seeds, 12 pairs of client and seed" in " ".join(table.notes)
    lost = {
        key: msgspec.structs.replace(one, failure="lost")
        for key, one in found.items()
        if one.label in grid.ALWAYS
    }
    (table,) = tables.tables(summary.rows(cells, found | lost), cells)
    assert not any("minus" in heading for heading in table.headings)


def test_a_baseline_may_be_the_best_and_without_validation_nothing_is_chosen() -> None:
    found = block({"fedrep": (0.7, 0.6), "local": (0.6, 0.8)})
    assert "no method is better than the baseline local" in comparison_page.verdict(found)
    found = block(dict.fromkeys(("fedrep", *grid.ALWAYS), (0.7, 0.0)))
    assert comparison_page.verdict(found).startswith("Without validation data no method is selected")


def test_one_seed_is_compared_over_clients() -> None:
    (row,) = [row for row in block({"fedrep": (0.7, 0.9)}, seeds=1).rows if row.method == "fedrep"]
    assert comparison_page.difference_text(row.differences["local"]).endswith("n = 4 clients)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    assert cli.main(["compare", "--methods", "fedrep", "--out", str(folder), "--html", *SMALL]) == 0
    return folder / comparison_page.NAME


def test_the_page_is_one_file_with_verdict_figures_and_tables(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"src=|href=(?!\"(?:#|data:image))|url\((?!#)|@import|https?:|//[a-z]", text)
    assert (
        len(re.findall(r"<figure", text)) == len(re.findall(r'<svg role="img" aria-label="[^"]+"', text)) >= 5
    )
    assert text.count("<figcaption>") == text.count("<figure") and "2 seeds" in text
    assert text.index('class="lead"') < text.index("<table") < text.index("<figure") < text.index("<details")
    for caption in re.findall(r"<figcaption>(.*?)</figcaption>", text):
        assert re.fullmatch(r"[^.]+(\d\.\d[^.]*)*\.", caption), caption  # one sentence


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_opens_offline_and_fits(
    page: Path, browser: Any, width: int, scheme: str, tmp_path: Path
) -> None:
    opens(page, browser, width, scheme, tmp_path)


def opens(page: Path, browser: Any, width: int, scheme: str, shots: Path) -> None:
    """Open a file without a network: no message, no request, nothing wider than the window."""
    said: list[str] = []
    context = browser.new_context(offline=True, viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.on("request", lambda request: said.append(request.url))
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(page.as_uri(), timeout=DEADLINE_S * 1000)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(
        "[...document.querySelectorAll('figure svg')].every(e => e.getBoundingClientRect().width > 200)"
    )
    tab.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.screenshot(path=shots / f"{page.stem}-{width}-{scheme}.png", full_page=True)
    context.close()
    assert said == [page.as_uri()]
