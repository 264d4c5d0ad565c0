"""The researcher's commands: simulate a run in this process, list and explain methods, look at earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_fl.cli import App, Format, FormatOption, say, show_table
from edge_fl.config import Recipe

if TYPE_CHECKING:
    from server.rounds import RoundResult
    from server.simulate import Outcome

RunsOption = Annotated[Path, typer.Option("--runs", help="The folder of all results.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the recipe, such as rounds=3 or method.options.temperature=0.5; may be repeated.",
    ),
]


def register(app: App) -> None:
    """Adds simulate, methods and runs."""
    app.root.command()(simulate)
    methods = app.group("methods", "The methods, and what each of them does.")
    methods.command("list")(list_methods)
    methods.command("show")(show_method)
    runs = app.group("runs", "Earlier runs and how they ended.")
    runs.command("list")(list_runs)


def simulate(
    recipe: Annotated[str, typer.Option(help="A recipe by name or path; the other options change it.")] = "",
    method: Annotated[str, typer.Option(help="A method, see 'edge-fl methods list'.")] = "",
    dataset: Annotated[str, typer.Option(help="A dataset, such as digits or fashion-mnist.")] = "",
    data_dir: Annotated[str, typer.Option(help="Where the .npz files of datasets are.")] = "",
    clients: Annotated[int | None, typer.Option(min=1)] = None,
    beta: Annotated[float | None, typer.Option(help="Dirichlet's beta; smaller is less alike.")] = None,
    model: Annotated[str, typer.Option(help="A model by name, or package.module:Class.")] = "",
    rounds: Annotated[int | None, typer.Option(min=0)] = None,
    epochs: Annotated[int | None, typer.Option(min=0)] = None,
    scale: Annotated[
        float | None, typer.Option(help="Keep this share of the data and of the rounds.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    set: SetOption = None,
    runs: RunsOption = Path("runs"),
    format: FormatOption = Format.TABLE,
) -> None:
    """Trains a federation in this process, without a broker, and prints every accuracy by its honest name."""
    from edge_fl import config
    from server import recipes
    from server import simulate as simulation
    from server.results import Results

    chosen = recipes.find(recipe) if recipe else Recipe(name="simulate")
    chosen = config.with_settings(_with_method(chosen, method), [
        *_settings({"data.dataset": dataset, "data.data_dir": data_dir, "data.clients": clients, "data.beta": beta}),
        *_settings({"model.name": model, "rounds": rounds, "method.epochs": epochs, "seed": seed}),
        'source="simulated"',
        *(set or []),
    ])  # fmt: skip
    chosen = scaled(chosen, scale) if scale else chosen
    study = simulation.prepare(chosen)
    say(study.histogram())
    with Results.create(runs, chosen, data_hash=study.dataset.samples.fingerprint()) as results:
        outcome = simulation.run(study, lambda result: _note(results, result, chosen.rounds))
        results.append_round({"round": chosen.rounds, "closing": True, "metrics": outcome.closing})
        results.write_summary("simulated", outcome.last())
    _print(outcome, format)
    say(f"results: {results.path}")


def scaled(recipe: Recipe, scale: float) -> Recipe:
    """A recipe that a small machine finishes: `scale` of the samples and of the rounds, at least one."""
    from edge_fl import config

    rounds = max(1, round(recipe.rounds * scale))
    return config.with_settings(recipe, [f"rounds={rounds}", f"data.fraction={recipe.data.fraction * scale}"])


def list_methods(format: FormatOption = Format.TABLE) -> None:
    """Every method: its family, which parts travel, what a head-only device does under it, and who wrote it."""
    from server.catalogue import COLUMNS, rows

    show_table(rows(), COLUMNS, format)


def show_method(
    name: str, model: Annotated[str, typer.Option(help="The model that bytes are counted for.")] = "cnn2"
) -> None:
    """One method: its hyper-parameters with range and source, what travels, bytes per round, deviations from the paper."""
    from server.catalogue import describe

    print(describe(name, model))


def list_runs(runs: RunsOption = Path("runs"), format: FormatOption = Format.TABLE) -> None:
    """Every run: method, dataset, source, and how it ended."""
    import msgspec

    from server.results import list_runs as found

    columns = ("run", "method", "dataset", "source", "state", "reason", "created")
    show_table([msgspec.to_builtins(run) for run in found(runs)], {name: name for name in columns}, format)


def _with_method(recipe: Recipe, method: str) -> Recipe:
    """The recipe with another method, under the optimiser that its paper uses."""
    if not method or method == recipe.method.name:
        return recipe
    import msgspec

    from edge_fl.methods import find

    usual = find(method).usual_optimiser or recipe.method.optimiser
    changed = msgspec.structs.replace(recipe.method, name=method, optimiser=usual, options={})
    return msgspec.structs.replace(recipe, method=changed)


def _settings(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value!r}".replace("'", '"') for key, value in values.items() if value not in ("", None)]


def _note(results: Any, result: RoundResult, rounds: int) -> None:
    from edge_fl.metrics import summarise_reports

    summary = summarise_reports(list(result.metrics.values()))
    means = "  ".join(f"{name} {value.mean:.3f}" for name, value in summary.items() if "test" in name)
    say(
        f"round {result.round}/{rounds}  {len(result.answered)}/{len(result.asked)} clients  {result.seconds:.1f} s  {means}"
    )
    results.append_round({
        "round": result.round,
        "seconds": result.seconds,
        "asked": result.asked,
        "answered": result.answered,
        "metrics": result.metrics,
    })  # fmt: skip


def _print(outcome: Outcome, format: Format) -> None:
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
