"""Commands on finished runs: `edge-fl report`, `edge-fl plots`, `edge-fl newtask`."""

from typing import Annotated, Literal

from edge_fl import plugins
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_paths, show_table
from edge_fl.console.tables import Column
from edge_fl.errors import MethodError
from edge_fl.options import DATA, DATA_DIR, FormatOption, argument, option
from edge_fl_server.cli import options
from edge_fl_server.cli.options import RUNS, RunsOption

RunArgument = Annotated[str, argument("RUN", "A run of 'edge-fl runs list', or its folder.")]


def plots(run: RunArgument, runs: RunsOption = RUNS, format: FormatOption = Format.TABLE) -> None:
    """Plot a run: labels per client, accuracy by round, features by class and client, class separation, CKA similarity."""
    from edge_fl_lab.report import run_plots
    from edge_fl_server.runs.results import Results, folder_of

    plugins.allow_working_folder()
    files, absent = run_plots.of_run(Results.open(folder_of(run, runs)))
    show_paths({path.name: path for path in files}, format)
    for why, names in absent.items():
        print_status(f"not drawn: {', '.join(names)}: {why}")


def newtask(
    run: RunArgument,
    dataset: Annotated[str, option("--dataset DATASET", "Dataset, the new one, by name.", DATA)],
    clients: Annotated[
        int, option("--clients N", "Number of clients; the new dataset is split over them.", DATA, min=1)
    ] = 20,
    beta: Annotated[
        float,
        option("--beta NUMBER", "Dirichlet concentration; smaller values make clients more different.", DATA),
    ] = 1.0,
    head: Annotated[
        str,
        option(
            "--head HEAD",
            "Kind of personal head: mlp or linear, in batches; or another name of 'edge-fl heads list', or package.module:Class.",
        ),
    ] = "mlp",
    iterations: Annotated[
        int, option("--iterations N", "Batches that each head is trained on.", min=1)
    ] = 100,
    data_dir: Annotated[str, DATA_DIR] = "",
    runs: RunsOption = RUNS,
    format: FormatOption = Format.TABLE,
) -> None:
    """Fit heads for a new dataset on a run's frozen extractor (RepPer, Figure 6); prints the accuracy over clients by iteration."""
    from edge_fl import heads, metrics
    from edge_fl.console.progress import Progress
    from edge_fl_lab import newcomers, recipe_heads, trained
    from edge_fl_server.recipes.recipe import with_settings
    from edge_fl_server.runs.results import Results, folder_of
    from edge_fl_server.training import studies

    plugins.allow_working_folder()
    old = trained.load(Results.open(folder_of(run, runs)))
    given = {
        "data.dataset": dataset,
        "data.data_dir": data_dir,
        "data.clients": clients,
        "data.beta": beta,
        "data.partition": "dirichlet",
        "data.unseen": 0,
    }
    study = studies.prepare(with_settings(old.recipe, [*options.settings(given), 'data.split=""']))
    classes, seed = len(study.dataset.classes), old.recipe.seed
    if head in newcomers.HEADS:
        training = newcomers.HeadTraining(iterations, every=max(iterations // 10, 1), head=head, seed=seed)
        with Progress() as progress:
            curve = newcomers.learn_new_task(
                old.method, old.shared, study.data(), classes, training, watch=progress
            )
        metric = metrics.PERSONAL_AFTER
    else:
        metric = metrics.of_head(heads.resolve(head).kind)
        if not old.method.exports:
            raise MethodError(f"{old.method.title}: shares no extractor, so no new head can use it")
        curve = {0: recipe_heads.fitted([head], old.method, old.shared, study.data(), seed, classes=classes)}
    rows = []
    for iteration, reports in curve.items():
        summary = metrics.summarise_reports(list(reports.values()))[metric]
        rows.append({
            "iterations": iteration if head in newcomers.HEADS else None,
            "mean": summary.mean,
            "std": summary.std,
            "bottom_decile": summary.bottom_decile,
        })  # fmt: skip
    columns = {"iterations": "iterations"} | {
        key: Column(key.replace("_", " "), units.percent) for key in ("mean", "std", "bottom_decile")
    }
    show_table(rows, columns, format)


def report(
    run: RunArgument,
    format: Annotated[
        Literal["html", "md", "json"],
        option(
            "--format html|md|json",
            "Output format: html writes RUN/report.html and prints its path; md and json are printed.",
        ),
    ] = "html",
    runs: RunsOption = RUNS,
) -> None:
    """Write the report of a run: settings, data sent, accuracies (global, before and after personalisation), charts, versions."""
    from edge_fl_lab.report import page
    from edge_fl_server.runs.results import Results, folder_of

    results = Results.open(folder_of(run, runs))
    if format == "html":
        print(page.write(results))
    else:
        print(page.FORMATS[format](page.report(results)), end="")
