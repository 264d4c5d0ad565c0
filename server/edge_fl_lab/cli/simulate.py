"""`edge-fl simulate`: train a federation in this process, without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table, show_text
from edge_fl.console.tables import Column
from edge_fl.errors import ConfigError
from edge_fl.options import DATA, DATA_DIR, TRAINING, FormatOption, option
from edge_fl_server.cli import options, user_imports
from edge_fl_server.cli.options import (
    RUNS,
    ClientsOption,
    EpochsOption,
    HeadsOption,
    ModelOption,
    RecipeOption,
    RoundsOption,
    RunsOption,
    ScaleOption,
    SetOption,
    SplitOption,
    TrackOption,
)

if TYPE_CHECKING:
    from edge_fl_server.orchestrate.execute import RunResult

EXAMPLE = "edge-fl simulate --method repper --dataset digits --rounds 10"
STATISTICS = ("mean", "weighted_mean", "std", "bottom_decile", "clients")


def simulate(
    recipe: RecipeOption = "",
    method: Annotated[str, option("--method METHOD", "A method, see 'edge-fl methods list'.", TRAINING)] = "",
    dataset: Annotated[
        str, option("--dataset DATASET", "A dataset, such as digits or fashion-mnist.", DATA)
    ] = "",
    data_dir: Annotated[str, DATA_DIR] = "",
    clients: ClientsOption = None,
    beta: Annotated[float | None, option("--beta NUMBER", options.BETA_HELP, DATA)] = None,
    split: SplitOption = "",
    save_split: Annotated[
        Path | None,
        option("--save-split FILE", "Write the split over clients to this CSV file, for --split.", DATA),
    ] = None,
    model: ModelOption = "",
    heads: HeadsOption = None,
    rounds: RoundsOption = None,
    epochs: EpochsOption = None,
    scale: ScaleOption = 1.0,
    seed: Annotated[
        int | None,
        option("--seed N", "Random seed for data split, training and sampling.", TRAINING, min=0),
    ] = None,
    engine: Annotated[
        str,
        option(
            "--engine ENGINE", "How clients are trained: auto, sequential, pool, vector or ray.", TRAINING
        ),
    ] = "",
    settings: SetOption = None,
    resume: Annotated[
        Path | None, option("--resume RUN", "Folder of an interrupted run to resume, without other settings.")
    ] = None,
    track: TrackOption = None,
    runs: RunsOption = RUNS,
    format: FormatOption = Format.TABLE,
) -> None:
    """Train a federation in this process, without a broker, and print its accuracies: global, before and after personalisation."""
    from edge_fl_lab.recipe_changes import scaled, with_method
    from edge_fl_server import recipes
    from edge_fl_server.orchestrate import run as orchestrator
    from edge_fl_server.recipes.recipe import Recipe, with_settings
    from edge_fl_server.runs import tracking
    from edge_fl_server.runs.results import Results
    from edge_fl_server.training import study as studies
    from edge_fl_server.training.engines import processes

    user_imports.allow()
    processes.prepare()  # before any thread starts
    if split and (clients or beta):
        raise ConfigError("--clients, --beta: the clients are those of the --split file")
    if resume:
        base = options.simulated(Results.open(resume).recipe(), "simulate --resume")
    else:
        base = recipes.find(recipe) if recipe else Recipe(name="simulate")
    given = {
        "data.dataset": dataset,
        "data.data_dir": data_dir,
        "data.clients": clients,
        "data.beta": beta,
        "data.split": split,
        "model.name": model,
        "rounds": rounds,
        "method.epochs": epochs,
        "seed": seed,
        "engine": engine,
        "heads": heads,
        "source": "simulated",
    }
    base = with_method(base, method) if method else base
    changes = [*options.settings(given), *(settings or [])]
    if resume and (recipe or method or scale != 1 or len(changes) > 1):
        raise ConfigError("simulate --resume: takes all settings from the run; expected no other option")
    chosen = scaled(options.simulated(with_settings(base, changes), "simulate"), scale)
    if save_split:
        studies.prepare(chosen).split.write_csv(save_split)
    trackers = tracking.find(track or [])
    results, outcome = orchestrator.run(chosen, runs, resume=resume, track=trackers)
    from edge_fl_lab.report import gains  # with matplotlib, which no round needs
    from edge_fl_lab.report import page as report

    written = report.write(results)
    _show_accuracies(outcome, format)
    found = report.report(results)
    if format is Format.TABLE:
        show_text(f"\n{found.verdict} {gains.lowest(found.groups)}".rstrip())
    print_status(f"results: {results.path}; report: {written}")
    print_status(f"next: edge-fl plots {results.path}")
    if not gains.has_baseline(found.groups):
        data = f"--dataset {chosen.data.dataset} --clients {chosen.data.clients} --rounds {chosen.rounds}"
        print_status(f"with baselines: edge-fl compare --methods {chosen.method.name} {data}")
    if outcome.exhausted:
        raise outcome.exhausted


def _show_accuracies(outcome: RunResult, format: Format) -> None:
    from edge_fl import metrics

    by_round = {"last": outcome.last()}
    if best := outcome.best_by_validation():
        by_round[f"best_by_validation (round {best[0]})"] = best[1]
    rows = [
        {"metric": name, "round": round, **{key: getattr(summary, key) for key in STATISTICS}}
        for round, summaries in by_round.items()
        for name, summary in summaries.items()
    ]
    if format is Format.JSON:
        show_table(rows, {key: key for key in rows[0]} if rows else {}, format)
        return
    columns = {key: key.replace("_", " ") for key in ("metric", "round", *STATISTICS)}
    accuracies = {key: Column(columns[key], units.percent) for key in STATISTICS[:-1]}
    others = [row for row in rows if metrics.ACCURACY not in row["metric"]]
    show_table([row for row in rows if row not in others], {**columns, **accuracies})
    if others:
        print()
        show_table(others, columns)
