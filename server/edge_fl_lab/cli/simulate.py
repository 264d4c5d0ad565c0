"""`edge-fl simulate`: train a federation in this process, without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl import plugins
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table, show_text
from edge_fl.console.tables import Column
from edge_fl.errors import ConfigError
from edge_fl.options import DATA, TRAINING, FormatOption, option
from edge_fl_lab.cli.options import RecipeOptions, simulated
from edge_fl_server.cli.options import RUNS, RunsOption, TrackOption

if TYPE_CHECKING:
    from edge_fl_server.orchestrate.execute import RunResult

STATISTICS = ("mean", "weighted_mean", "std", "bottom_decile", "clients")


def simulate(
    method: Annotated[str, option("--method METHOD", "A method, see 'edge-fl methods list'.", TRAINING)] = "",
    dataset: Annotated[
        str, option("--dataset DATASET", "A dataset, such as digits or fashion-mnist.", DATA)
    ] = "",
    save_split: Annotated[
        Path | None,
        option(
            "--save-split FILE",
            "Write the split over clients to this CSV file, for --set data.split=FILE.",
            DATA,
        ),
    ] = None,
    resume: Annotated[
        Path | None, option("--resume RUN", "Folder of an interrupted run to resume, without other settings.")
    ] = None,
    track: TrackOption = None,
    runs: RunsOption = RUNS,
    *,
    recipe: RecipeOptions,
    format: FormatOption = Format.TABLE,
) -> None:
    """Train a federation in this process, without a broker, and print its accuracies: global, before and after personalisation."""
    from edge_fl_lab.recipe_changes import with_method
    from edge_fl_server.orchestrate import run
    from edge_fl_server.runs import tracking
    from edge_fl_server.runs.results import Results
    from edge_fl_server.training import studies
    from edge_fl_server.training.engines import processes

    plugins.allow_working_folder()
    processes.prepare()  # before any thread starts
    changes = recipe.changes(data__dataset=dataset)
    if resume:
        if recipe.recipe or method or recipe.scale != 1 or changes:
            raise ConfigError("simulate --resume: takes all settings from the run; expected no other option")
        base = simulated(Results.open(resume).recipe(), "simulate --resume")
    else:
        base = recipe.base("simulate")
    base = with_method(base, method) if method else base
    chosen = recipe.applied(base, changes, "simulate")
    if save_split:
        studies.prepare(chosen).split.write_csv(save_split)
    trackers = tracking.find(track or [])
    results, outcome = run.run(chosen, runs, resume=resume, track=trackers)
    from edge_fl_lab.report import (
        gains,  # with matplotlib, which no round needs
        page,
    )

    written = page.write(results)
    _show_accuracies(outcome, format)
    found = page.report(results)
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
