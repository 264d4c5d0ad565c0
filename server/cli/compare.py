"""The command `edge-fl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import FormatOption
from edge_fl.console.output import Format, print_status
from edge_fl.errors import InputError, RunError
from server.cli import user_imports
from server.cli.options import SetOption


def compare(
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, with commas, options behind ':' (fedcrc:tau=0.9, fedavg:compression.kind=int8); 'all' for every one."
        ),
    ] = "",
    recipe: Annotated[str, typer.Option(help="A recipe by name or path, see 'edge-fl recipes list'.")] = "",
    dataset: Annotated[str, typer.Option(help="Datasets, with commas.")] = "",
    partitions: Annotated[
        str, typer.Option(help="Partitions, with commas: dirichlet:0.1, pathological:2, domain, iid.")
    ] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from the recipe's on.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="How many clients share the data.")] = None,
    model: Annotated[str, typer.Option(help="A model by name, or package.module:Class.")] = "",
    rounds: Annotated[int | None, typer.Option(min=0, help="Communication rounds.")] = None,
    epochs: Annotated[int | None, typer.Option(min=0, help="Local epochs per round.")] = None,
    data_dir: Annotated[str, typer.Option(help="Where the .npz files of datasets are.")] = "",
    scale: Annotated[float, typer.Option(min=1e-6, max=1, help="Keep this share of the data and of the rounds.")] = 1.0,
    settings: SetOption = None,
    target: Annotated[float | None, typer.Option(min=0, max=1, help="Count bytes until this mean accuracy.")] = None,
    against_paper: Annotated[bool, typer.Option("--against-paper", help="Put the paper's figures beside ours.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time, each in a process with one thread.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed before.")] = False,
    plots: Annotated[bool, typer.Option("--plots", help="Draw the comparison as well.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder of this comparison; what it holds is not run again.")] = None,
    format: FormatOption = Format.TABLE,
) -> None:  # fmt: skip
    """Compare methods on the same clients, always with Local, FedAvg and FedAvg+FT; a second call runs only what is missing."""
    from edge_fl import config
    from edge_fl.methods import names
    from server import recipes
    from server.compare import comparison, grid, paper, render, summary, tables
    from server.recipes.changes import scaled

    if against_paper and (not recipe or dataset or partitions):
        raise InputError("--against-paper: needs --recipe, and neither --dataset nor --partitions")
    base = recipes.find(recipe) if recipe else config.Recipe(name="compare")
    given = {
        "data.clients": clients,
        "model.name": model,
        "rounds": rounds,
        "method.epochs": epochs,
        "data.data_dir": data_dir,
    }
    user_imports.from_here()
    base = config.with_settings(base, [
        *(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in given.items() if value not in ("", None)),
        'source="simulated"',
        *(settings or []),
    ])  # fmt: skip
    base = scaled(base, scale)
    if not (methods or recipe):
        raise InputError("--methods: none given, expected some or --recipe")
    if against_paper:
        paper.figures(recipe)
    chosen = names() if methods == "all" else grid.split_list(methods) or paper.methods_of(base)
    cells = grid.cells(
        base, chosen, grid.split_list(dataset), grid.split_list(partitions), seeds or base.compare.seeds
    )
    folder = out or Path("runs") / f"compare-{(recipe and Path(recipe).stem) or dataset or base.data.dataset}"

    try:
        found = comparison.run(cells, folder, jobs, retry=retry)
    except KeyboardInterrupt:
        print_status(
            f"interrupted; the finished cells are in {folder}, and the same command goes on from there"
        )
        raise
    rows = summary.rows(cells, found, target)
    drawn = tables.tables(rows, cells, target)
    comparison.save(folder, "table", drawn, comparison.table_records(rows))
    comparison.save_rows(folder, rows, cells, found)
    if against_paper:
        beside = paper.against(recipe, cells, found)
        comparison.save(folder, "paper", [beside], comparison.by_heading(beside))
        drawn = [*drawn, beside]
    if plots:
        from server.report import run_plots

        print_status(
            f"pictures: {len(run_plots.of_comparison(cells, found, folder))} files in {folder / 'plots'}"
        )
    print((folder / "table.json").read_text() if format is Format.JSON else render.together(drawn, "txt"))
    for note in comparison.commits(found):
        print_status(note)
    print_status(f"results: {folder}")
    failed = [cell for cell in cells if cell.key in found and found[cell.key].failure]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(cells)} cells failed ({failed[0]}: {found[failed[0].key].failure}); the others are in {folder}"
        )
