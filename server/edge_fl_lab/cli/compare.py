"""`edge-fl compare`: compare methods on the same clients."""

from functools import partial
from pathlib import Path
from typing import Annotated

from edge_fl import plugins
from edge_fl.console.output import Format, print_status, show_json, show_tables, show_text
from edge_fl.errors import InputError, RunError
from edge_fl.files.paths import text
from edge_fl.options import DATA, FOLDERS, TRAINING, FormatOption, option
from edge_fl_lab.cli.simulate import RecipeOptions
from edge_fl_server.cli.options import RUNS


def compare(
    methods: Annotated[
        str,
        option(
            "--methods METHODS",
            "Methods, comma-separated, with options after ':' (fedcrc:tau=0.9, fedavg:compression.kind=int8), or 'all'; also"
            " package.module:Class.",
            TRAINING,
        ),
    ] = "",
    without: Annotated[
        str,
        option(
            "--without METHODS",
            "Methods to leave out, comma-separated: local, fedavg or fedavg+ft, or some of 'all' or the recipe.",
            TRAINING,
        ),
    ] = "",
    datasets: Annotated[str, option("--datasets DATASETS", "Datasets, comma-separated.", DATA)] = "",
    partitions: Annotated[
        str,
        option(
            "--partitions PARTITIONS",
            "Partitions, comma-separated: dirichlet:0.1, pathological:2, domain, iid.",
            DATA,
        ),
    ] = "",
    seeds: Annotated[
        int | None, option("--seeds N", "Number of seeds, starting at the recipe's.", TRAINING, min=1)
    ] = None,
    target: Annotated[
        float | None, option("--target SHARE", "Mean accuracy up to which bytes are counted.", min=0, max=1)
    ] = None,
    tune: Annotated[
        bool,
        option(
            "--tune", "Choose each method's learning rate and hyper-parameters on validation data.", "Tuning"
        ),
    ] = False,
    tune_trials: Annotated[
        int | None,
        option(
            "--tune-trials N", "Configurations to try per method with --tune; 6.", "Tuning", min=2, max=100
        ),
    ] = None,
    tune_values: Annotated[
        list[str] | None,
        option(
            "--tune-values METHOD:KEY=VALUES",
            "Values to try instead of a method's own, fedcrc:tau=0.9,0.99; repeatable.",
            "Tuning",
        ),
    ] = None,
    against_paper: Annotated[
        bool, option("--against-paper", "Compare with the paper's figures too.")
    ] = False,
    jobs: Annotated[
        int, option("--jobs N", "Number of concurrent cells, each a process with one thread.", min=1)
    ] = 1,
    retry: Annotated[bool, option("--retry", "Run failed cells again.")] = False,
    estimate: Annotated[
        bool, option("--estimate", "Print how long the missing cells will take, and run none.")
    ] = False,
    plots: Annotated[bool, option("--plots", "Also plot the comparison.")] = False,
    html: Annotated[
        bool, option("--html", "Also write one page with verdict, differences, plots and tables.")
    ] = False,
    out: Annotated[
        Path | None,
        option(
            "--out FOLDER",
            "Folder to write to; cells stored in it are not run again [runs/compare-NAME].",
            FOLDERS,
        ),
    ] = None,
    *,
    recipe: RecipeOptions,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare methods on the same clients, with Local, FedAvg and FedAvg+FT unless left out; a second call runs only missing cells."""
    from edge_fl.methods import names
    from edge_fl_lab.compare import comparison, grid, paper, summary, tables, tuning

    if against_paper and (not recipe.recipe or datasets or partitions):
        raise InputError("--against-paper: needs --recipe, and neither --datasets nor --partitions")
    if not tune and (tune_trials or tune_values):
        raise InputError("--tune-trials, --tune-values: only with --tune")
    if tune and estimate:
        raise InputError("--estimate: not with --tune, which decides after its first cells what else it runs")
    plugins.allow_working_folder()
    grids = tuning.parse_grids(tune_values or [])
    base = recipe.applied(recipe.base("compare"), recipe.changes(), "compare")
    if not (methods or recipe.recipe):
        raise InputError("compare: no methods, expected --methods or --recipe")
    if against_paper:
        paper.figures(recipe.recipe)
    chosen = (
        names()
        if methods == "all"
        else grid.split_list(methods) or base.compare.methods or [base.method.name]
    )
    cells = grid.cells(
        base,
        chosen,
        grid.split_list(datasets),
        grid.split_list(partitions),
        seeds or base.compare.seeds,
        grid.split_list(without),
    )
    folder = (
        out
        or RUNS
        / f"compare-{text((recipe.recipe and Path(recipe.recipe).stem) or datasets or base.data.dataset)}"
    )

    if estimate:
        expected = comparison.estimate(cells, folder, retry=retry)
        if format is Format.JSON:
            show_json({"cells": len(expected.cells), "jobs": jobs, "seconds": expected.seconds(jobs)})
        else:
            show_text(expected.text(jobs))
        return
    run = partial(comparison.run, folder=folder, jobs=jobs, retry=retry)
    trials, reported = [], cells
    try:
        if tune:
            comparison.check(tuning.variants(cells, grids))
            trials = tuning.search(cells, run, tune_trials or tuning.TRIALS, grids)
            reported = tuning.tuned(cells, trials)
        results = run([*cells, *reported])
    except KeyboardInterrupt:
        print_status(f"finished cells are in {text(folder)}, and the same command resumes")
        raise
    rows = summary.rows(reported, results, target)
    shown, records = tables.tables(rows, cells, target), [tables.record(row) for row in rows]
    tuned_rows = []
    if tune:
        untuned = summary.rows(cells, results)
        tuned_rows = [tables.TunedRow(*each) for each in zip(trials, rows, untuned, strict=True)]
        shown = tables.tuned_tables(tuned_rows, cells, target)
        records = [tables.tuned_record(row) for row in tuned_rows]
    comparison.save(folder, "table", shown, records)
    comparison.save_rows(
        folder, rows, [*cells, *(cell for cell in reported if cell not in cells)], results, tuned_rows
    )
    comparison.save_curves(folder, reported, results)
    if against_paper:
        paper_table = paper.against(recipe.recipe, cells, results)
        comparison.save(folder, "paper", [paper_table], comparison.records(paper_table))
        shown = [*shown, paper_table]
    from edge_fl.console.progress import Progress
    from edge_fl_lab.report import comparison_page  # with matplotlib, which no cell needs

    if plots:
        with Progress() as progress:
            files = comparison_page.save(reported, results, folder, progress)
        print_status(f"plots: {len(files)} files in {text(folder / 'plots')}")
    if html:
        with Progress() as progress:
            page = comparison_page.write(folder, shown, reported, results, progress)
        print_status(f"page: {page}")
    if format is Format.JSON:
        print((folder / "table.json").read_text())
    else:
        show_tables(shown)
        print()
        for where, _ in grid.blocks(reported):
            found = comparison_page.block(reported, results, where)
            show_text(f"{found.where}: {comparison_page.verdict(found)}")
    print_status(f"results: {text(folder)}")
    if not html:
        print_status(
            "next: repeat the command with --html for a page with plots; no finished cell is run again"
        )
    every = {cell.key: cell for cell in [*cells, *reported]}
    failed = [cell for key, cell in every.items() if key in results and results[key].failure]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(every)} cells failed ({failed[0]}: {results[failed[0].key].failure}); the others are in {text(folder)}"
        )
