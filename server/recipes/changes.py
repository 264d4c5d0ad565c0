"""A recipe turned into another one: for another method, or smaller; and what the two then differ in, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from edge_fl.config import MethodConfig, OptimiserConfig, Option, Recipe
from edge_fl.methods import find

UNIMPORTANT = (
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
    """The recipe with another method, and with `options` on top of its own.

    In a paper's table all methods train alike, but for what [methods] says about this one (and, behind +ft, about the method that is
    tuned). Elsewhere a method comes with the optimiser that its paper uses.
    """
    method = recipe.method
    if name != method.name:
        usual = None if recipe.compare.methods else find(name).usual_optimiser
        method = replace(method, name=name, optimiser=usual or method.optimiser, options={})
    for known in dict.fromkeys([name.removesuffix("+ft"), name]):
        if change := recipe.methods.get(known):
            method = _changed(method, msgspec.to_builtins(change))
    return replace(recipe, method=replace(method, options={**method.options, **(options or {})}))


def scaled(recipe: Recipe, scale: float) -> Recipe:
    """A recipe that a small machine finishes: `scale` of the samples and of the rounds, at least one; schedules shrink along."""
    if scale == 1:
        return recipe
    data, method = recipe.data, recipe.method
    return replace(
        recipe,
        rounds=_share(recipe.rounds, scale),
        evaluate_every=_share(recipe.evaluate_every, scale),
        data=replace(data, fraction=data.fraction * scale, max_train=_share(data.max_train, scale)),
        method=replace(method, optimiser=_sooner(method.optimiser, scale)),
        methods={
            name: replace(change, optimiser=change.optimiser and _sooner(change.optimiser, scale))
            for name, change in recipe.methods.items()
        },
    )


def differences(planned: Recipe, run: Recipe) -> list[str]:
    """What was run otherwise than planned, such as "rounds: 1000 -> 30"; seeds, names and machines do not count."""
    before, after = _flat(msgspec.to_builtins(planned)), _flat(msgspec.to_builtins(run))
    return [
        f"{key}: {_word(before.get(key))} -> {_word(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not key.startswith(UNIMPORTANT)
    ]


def _changed(method: MethodConfig, change: Mapping[str, Any]) -> MethodConfig:
    return msgspec.convert(
        {**msgspec.to_builtins(method), **change, "options": {**method.options, **change.get("options", {})}},
        MethodConfig,
    )


def _sooner(optimiser: OptimiserConfig, scale: float) -> OptimiserConfig:
    return replace(
        optimiser, lr_steps=[(_share(start, scale), factor) for start, factor in optimiser.lr_steps]
    )


def _share(count: int, scale: float) -> int:
    """`scale` of a count, at least one; 0 stays 0, which everywhere means none or all."""
    return max(1, round(count * scale)) if count else 0


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {key: tree}
    return {
        k: v for name, value in tree.items() for k, v in _flat(value, f"{key}.{name}".lstrip(".")).items()
    }


def _word(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
