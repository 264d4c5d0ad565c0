"""The researcher's commands: simulate a run, compare methods, list methods, recipes and earlier runs, draw, fetch datasets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_fl.cli import App, FormatOption
from edge_fl.config import Recipe
from edge_fl.console.output import Format, print_status, show_table
from server.cli import user_imports
from server.cli.options import RunsOption, SetOption, TrackOption

if TYPE_CHECKING:
    from server.orchestrate.execute import RunResult


def register(app: App) -> None:
    """Adds simulate, compare, methods, recipes, runs, plots, newtask and data."""
    app.root.command()(simulate)
    app.root.command()(plots)
    app.root.command()(newtask)
    methods = app.group("methods", "Federated methods: list them, show one in detail.")
    methods.command("list")(list_methods)
    methods.command("show")(show_method)
    recipes = app.group("recipes", "The built-in recipes: the settings of the papers' tables.")
    recipes.command("list")(list_recipes)
    runs = app.group("runs", "Earlier runs and how they ended.")
    runs.command("list")(list_runs)
    data = app.group("data", "Datasets, as .npz files in a folder.")
    data.command("download")(download)


def simulate(
    recipe: Annotated[str, typer.Option(help="A recipe by name or path; the other options change it.")] = "",
    method: Annotated[str, typer.Option(help="A method, see 'edge-fl methods list'.")] = "",
    dataset: Annotated[str, typer.Option(help="A dataset, such as digits or fashion-mnist.")] = "",
    data_dir: Annotated[str, typer.Option(help="Where the .npz files of datasets are.")] = "",
    clients: Annotated[int | None, typer.Option(min=1, help="How many clients share the data.")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Of the Dirichlet distribution: small is uneven.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model by name, or package.module:Class.")] = "",
    rounds: Annotated[int | None, typer.Option(min=0, help="Communication rounds.")] = None,
    epochs: Annotated[int | None, typer.Option(min=0, help="Local epochs per round.")] = None,
    scale: Annotated[
        float, typer.Option(min=1e-6, max=1, help="Keep this share of the data and of the rounds.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything random in the run.")] = None,
    engine: Annotated[
        str, typer.Option(help="How clients are trained: auto, sequential, pool, vector or ray.")
    ] = "",
    set: SetOption = None,
    track: TrackOption = None,
    runs: RunsOption = Path("runs"),
    format: FormatOption = Format.TABLE,
) -> None:
    """Train a federation in this process, without a broker, and print its accuracies: global, personal, before and after."""
    from edge_fl import config
    from server import recipes
    from server.orchestrate import run as orchestrator
    from server.orchestrate.setup import RunRequest
    from server.recipes.changes import scaled, with_method
    from server.report import page as report
    from server.runs import tracking

    user_imports.from_here()
    chosen = recipes.find(recipe) if recipe else Recipe(name="simulate")
    chosen = config.with_settings(with_method(chosen, method) if method else chosen, [
        *_settings({"data.dataset": dataset, "data.data_dir": data_dir, "data.clients": clients, "data.beta": beta}),
        *_settings({"model.name": model, "rounds": rounds, "method.epochs": epochs, "seed": seed}),
        *_settings({"engine": engine}),
        'source="simulated"',
        *(set or []),
    ])  # fmt: skip
    chosen = scaled(chosen, scale)
    trackers = tracking.find(track or [])
    results, outcome = orchestrator.run(RunRequest(chosen, runs=runs, track=trackers))
    report.write(results)
    _print(outcome, format)
    print_status(f"results: {results.path}")
    if outcome.exhausted:
        raise outcome.exhausted


def list_methods(format: FormatOption = Format.TABLE) -> None:
    """List every method: its family, which parts travel, what a head-only device does under it, and its paper."""
    from server.catalogue import COLUMNS, rows

    show_table(rows(), COLUMNS, format)


def show_method(
    name: str,
    model: Annotated[str, typer.Option(help="The model that bytes are counted for.")] = "cnn2",
    egress: Annotated[
        bool, typer.Option("--egress", help="Only what may leave a device, by tier, as JSON.")
    ] = False,
) -> None:
    """Show one method: its hyper-parameters with range and source, what travels, bytes per round, deviations from the paper."""
    from server import catalogue

    print(catalogue.egress_json(name) if egress else catalogue.describe(name, model))


def list_recipes(format: FormatOption = Format.TABLE) -> None:
    """List every recipe: its method, dataset, partition, size, and which table of which paper it reproduces."""
    from server import recipes
    from server.compare.grid import partition_label

    rows = []
    for name in recipes.names():
        recipe = recipes.find(name)
        rows.append({
            "recipe": name,
            "method": recipe.method.name,
            "dataset": recipe.data.dataset,
            "partition": partition_label(recipe.data),
            "clients": recipe.data.clients,
            "participation": recipe.cohort.participation,
            "rounds": recipe.rounds,
            "what": recipes.title(name),
        })  # fmt: skip
    show_table(rows, {key: key for key in rows[0]}, format)


def plots(
    run: Annotated[str, typer.Argument(help="A run of 'edge-fl runs list', or its folder.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Draw a run: labels per client, accuracy by round, features by class and client, class separation, similarity of networks."""
    from server.report import run_plots
    from server.runs.results import Results

    user_imports.from_here()
    for path in run_plots.of_run(Results.open(_run_folder(run, runs))):
        print(path)


def newtask(
    run: Annotated[str, typer.Argument(help="A run of 'edge-fl runs list', or its folder.")],
    to: Annotated[str, typer.Option(help="The dataset of the new task.")],
    clients: Annotated[int, typer.Option(min=1, help="How many clients share the new task's data.")] = 20,
    beta: Annotated[
        float, typer.Option(help="Of the new task's Dirichlet distribution: small is uneven.")
    ] = 1.0,
    head: Annotated[str, typer.Option(help="What is fitted: mlp or linear.")] = "mlp",
    iterations: Annotated[int, typer.Option(min=1, help="Batches that each head is trained on.")] = 100,
    data_dir: Annotated[str, typer.Option(help="Where the .npz files of datasets are.")] = "",
    runs: RunsOption = Path("runs"),
    format: FormatOption = Format.TABLE,
) -> None:
    """Fit new heads for a new task on a run's frozen extractor (RepPer, Figure 6): mean accuracy over clients by iteration."""
    from edge_fl import config, metrics
    from edge_fl.console.progress import Progress
    from server.runs import trained
    from server.runs.results import Results
    from server.training import newcomers
    from server.training import study as studies

    user_imports.from_here()
    old = trained.load(Results.open(_run_folder(run, runs)))
    run_id = studies.prepare(config.with_settings(old.recipe, [
        *_settings({"data.dataset": to, "data.data_dir": data_dir, "data.clients": clients, "data.beta": beta}),
        'data.partition="dirichlet"', "data.unseen=0",
    ]))  # fmt: skip
    training = newcomers.HeadTraining(iterations, every=max(iterations // 10, 1), head=head)
    classes = len(run_id.dataset.classes)
    with Progress() as progress:
        found = newcomers.learn_new_task(
            old.method, old.shared, run_id.data(), classes, training, old.recipe.seed, watch=progress
        )
    rows = []
    for done, reports in found.items():
        summary = metrics.summarise_reports(list(reports.values()))[metrics.PERSONAL_AFTER]
        rows.append(
            {
                "iterations": done,
                "mean": summary.mean,
                "std": summary.std,
                "worst tenth": summary.bottom_decile,
            }
        )
    show_table(rows, {key: key for key in rows[0]}, format)


def download(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, emnist, cifar10 or cifar100.")],
    data_dir: Annotated[Path, typer.Option(help="The folder that takes the .npz file.")] = Path(".data"),
) -> None:
    """Fetch a dataset through torchvision, or convert its original files if they are in the folder already."""
    from server.dataset_download import download

    print(download(name, data_dir))


def list_runs(runs: RunsOption = Path("runs"), format: FormatOption = Format.TABLE) -> None:
    """List every run: method, dataset, source, and how it ended."""
    import msgspec

    from server.runs.results import list_runs as found

    columns = ("run", "method", "dataset", "source", "state", "reason", "created")
    rows = [msgspec.to_builtins(run) for run in found(runs)]
    show_table(rows, {name: name for name in columns}, format)
    if not rows:
        print_status(f"{runs}: no runs there")


def _run_folder(run: str, runs: Path) -> Path:
    return Path(run) if Path(run).is_dir() else runs / run


def _settings(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value!r}".replace("'", '"') for key, value in values.items() if value not in ("", None)]


def _print(outcome: RunResult, format: Format) -> None:
    best = outcome.best_by_validation()
    found = [
        ("last", outcome.last()),
        *([(f"best_by_validation (round {best[0]})", best[1])] if best else []),
    ]
    rows = [
        {
            "metric": name,
            "round": which,
            **{
                key: getattr(value, key)
                for key in ("mean", "weighted_mean", "std", "bottom_decile", "clients")
            },
        }
        for which, summary in found
        for name, value in summary.items()
    ]
    keys = ("metric", "round", "mean", "weighted_mean", "std", "bottom_decile", "clients")
    show_table(rows, {key: key.replace("_", " ") for key in keys}, format)
