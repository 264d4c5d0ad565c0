"""Recipes derived from a recipe: with another method, or scaled down; and the differences between two recipes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from edge_fl.config import MethodConfig, OptimiserConfig, Option
from edge_fl.methods import find
from edge_fl_server.recipes.recipe import Recipe

IGNORED = (
    "name",
    "seed",
    "device",
    "data.data_dir",
    "evaluate_every",
    "compare",
    "methods",
    "release",
    "broker",
)


def with_method(recipe: Recipe, name: str, options: Mapping[str, Option] | None = None) -> Recipe:
    """Replace the method; `options` override the recipe's.

    In a paper's table all methods share the recipe's settings, except for the entry of this method in [methods] (of NAME+ft: of NAME too).
    Elsewhere a method gets the optimiser of its own paper.
    """
    method = recipe.method
    if name != method.name:
        usual = None if recipe.compare.methods else find(name).usual_optimiser
        method = replace(method, name=name, optimiser=usual or method.optimiser, options={})
    for entry in dict.fromkeys([name.removesuffix("+ft"), name]):
        if change := recipe.methods.get(entry):
            method = _changed(method, msgspec.to_builtins(change))
    return replace(recipe, method=replace(method, options={**method.options, **(options or {})}))


def scaled(recipe: Recipe, scale: float) -> Recipe:
    """Reduce samples and rounds to the share `scale`, at least one of each; schedules shrink with them."""
    if scale == 1:
        return recipe
    data, method = recipe.data, recipe.method
    return replace(
        recipe,
        rounds=_scaled_count(recipe.rounds, scale),
        evaluate_every=_scaled_count(recipe.evaluate_every, scale),
        data=replace(data, fraction=data.fraction * scale, max_train=_scaled_count(data.max_train, scale)),
        method=replace(method, optimiser=_shortened_schedule(method.optimiser, scale)),
        methods={
            name: replace(change, optimiser=change.optimiser and _shortened_schedule(change.optimiser, scale))
            for name, change in recipe.methods.items()
        },
    )


def differences(planned: Recipe, run: Recipe) -> list[str]:
    """Describe each setting that differs, such as "rounds: 1000 -> 30"; names, seeds and machine settings are ignored."""
    before, after = (flat(msgspec.to_builtins(recipe)) for recipe in (planned, run))
    return [
        f"{key}: {_value_text(before.get(key))} -> {_value_text(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not key.startswith(IGNORED)
    ]


def _changed(method: MethodConfig, change: Mapping[str, Any]) -> MethodConfig:
    return msgspec.convert(
        {**msgspec.to_builtins(method), **change, "options": {**method.options, **change.get("options", {})}},
        MethodConfig,
    )


def _shortened_schedule(optimiser: OptimiserConfig, scale: float) -> OptimiserConfig:
    return replace(
        optimiser, lr_steps=[(round((start - 1) * scale) + 1, factor) for start, factor in optimiser.lr_steps]
    )


def _scaled_count(count: int, scale: float) -> int:
    """At least 1; 0 stays 0, which means "none" or "all"."""
    return max(1, round(count * scale)) if count else 0


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _value_text(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
