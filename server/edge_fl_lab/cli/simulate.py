"""`edge-fl simulate`: train a federation in this process, without a broker; and the options of a recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl import plugins
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table, show_text
from edge_fl.console.tables import Column
from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.options import DATA, DATA_DIR, TRAINING, FormatOption, option
from edge_fl_server.cli import options
from edge_fl_server.cli.options import RUNS, RunsOption, SetOption, TrackOption

if TYPE_CHECKING:
    from edge_fl_server.orchestrate.execution import RunResult
    from edge_fl_server.recipes.recipe import Recipe


STATISTICS = ("mean", "weighted_mean", "std", "bottom_decile", "clients")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """A recipe, and settings that replace its own."""

    recipe: Annotated[
        str, option("--recipe RECIPE", "Recipe: a TOML file, or a name of 'edge-fl recipes list'.")
    ] = ""
    data_dir: Annotated[str, DATA_DIR] = ""
    clients: Annotated[
        int | None,
        option("--clients N", "Number of clients; the data are split over them.", DATA, min=1),
    ] = None
    scale: Annotated[
        float,
        option("--scale SHARE", "Share of the data and of the rounds to use.", DATA, min=1e-6, max=1),
    ] = 1.0
    model: Annotated[
        str, option("--model MODEL", "Model of 'edge-fl models list', or package.module:Class.", TRAINING)
    ] = ""
    heads: Annotated[
        list[str] | None,
        option(
            "--head HEAD",
            "Kind of personal head, fitted on the final extractor too: of 'edge-fl heads list', or package.module:Class; may be repeated.",
        ),
    ] = None
    rounds: Annotated[int | None, option("--rounds N", "Communication rounds.", TRAINING, min=0)] = None
    settings: SetOption = None

    def base(self, name: str) -> Recipe:
        """The recipe that was named, or one of defaults with this name."""
        from edge_fl_server import recipes
        from edge_fl_server.recipes.recipe import Recipe

        return recipes.find(self.recipe) if self.recipe else Recipe(name=name)

    def changes(self, **more: object) -> list[str]:
        """The settings that were given, "key=value"; `more` are those of further options, with "__" for the dots of a key."""
        given = {
            "data.data_dir": self.data_dir,
            "data.clients": self.clients,
            "model.name": self.model,
            "heads": self.heads,
            "rounds": self.rounds,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return [*options.settings(given), *(self.settings or [])]

    def applied(self, recipe: Recipe, changes: list[str], command: str) -> Recipe:
        """The recipe with these changes and scaled, if all its clients are simulated. Raises ConfigError."""
        from edge_fl_lab.recipe_changes import scaled
        from edge_fl_server.recipes.recipe import with_settings

        changed = simulated(with_settings(recipe, ["source=simulated", *changes]), command)
        if changed.data.split and self.clients:
            raise ConfigError(f"--clients: the clients are those of data.split, {changed.data.split}")
        return scaled(changed, self.scale)


def simulated(recipe: Recipe, command: str) -> Recipe:
    """The recipe, if all its clients are simulated. Raises ConfigError."""
    if recipe.source != "simulated":
        raise ConfigError(
            f"source = {recipe.source!r}: {command} trains all clients in this process, no device takes part;"
            " expected simulated, or 'edge-fl server run' for devices"
        )
    return recipe


def simulate(
    method: Annotated[
        str,
        option(
            "--method METHOD",
            "Method of 'edge-fl methods list', or package.module:Class, with options after ':' (fedcrc:tau=0.9).",
            TRAINING,
        ),
    ] = "",
    dataset: Annotated[
        str, option("--dataset DATASET", "Dataset, by name, such as digits or fashion-mnist.", DATA)
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
        str, option("--resume RUN", "Interrupted run to resume, without other options: its name or folder.")
    ] = "",
    track: TrackOption = None,
    runs: RunsOption = RUNS,
    *,
    recipe: RecipeOptions,
    format: FormatOption = Format.TABLE,
) -> None:
    """Train a federation in this process, without a broker, and print its accuracies: global, before and after personalisation."""
    from edge_fl_lab.compare import grid
    from edge_fl_lab.recipe_changes import with_method
    from edge_fl_server.orchestrate import run
    from edge_fl_server.runs import round_metrics
    from edge_fl_server.runs.results import Results, folder_of
    from edge_fl_server.training import studies
    from edge_fl_server.training.engines import processes

    plugins.allow_working_folder()
    processes.prepare()  # before any thread starts
    changes = recipe.changes(data__dataset=dataset)
    resumed = folder_of(resume, runs) if resume else None
    if resumed:
        if recipe.recipe or method or recipe.scale != 1 or changes:
            raise ConfigError("simulate --resume: takes all settings from the run; expected no other option")
        base = simulated(Results.open(resumed).recipe(), "simulate --resume")
    else:
        base = recipe.base("simulate")
    if method:
        base = with_method(base, *grid.parse_method(method))
        changes = [*grid.parse_settings(method), *changes]
    chosen = recipe.applied(base, changes, "simulate")
    if save_split:
        studies.prepare(chosen).split.write_csv(save_split)
    trackers = round_metrics.find(track or [])
    results, outcome = run.run(
        chosen,
        runs,
        resume=resumed,
        track=trackers,
        resumption=lambda begun: shlex.join(["edge-fl", "simulate", "--resume", text(begun.path)]),
    )
    from edge_fl_lab.report import facts, page  # with matplotlib, which no round needs

    written = page.write(results)
    _show_accuracies(outcome, format)
    found = page.report(results)
    if format is Format.TABLE:
        show_text(f"\n{found.verdict} {facts.lowest(found.groups)}".rstrip())
    print_status(f"results: {results.path}; report: {written}")
    print_status(f"next: edge-fl plots {results.path}")
    if not facts.has_baseline(found.groups):
        settings = results.path / "config.toml"  # all of the run's, whichever option or recipe they come from
        out = results.path.with_name(f"compare-{results.id}")
        command = [
            "edge-fl",
            "compare",
            "--methods",
            chosen.method.name,
            "--recipe",
            text(settings),
            "--out",
            text(out),
        ]
        print_status(f"with baselines: {shlex.join(command)}")
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
