"""The grid of a comparison: methods x datasets x partitions x seeds. A cell's key is a hash of everything that determines its numbers."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_fl import methods as known_methods
from edge_fl.config import Option
from edge_fl.data.datasets import stated_input
from edge_fl.errors import InputError, nearest
from edge_fl.methods.contract.method import check_hypers, hypers_of
from edge_fl.methods.finetuned import FineTuned
from edge_fl.toml import parse_value
from edge_fl_lab.recipe_changes import with_method
from edge_fl_server.recipes import PARTITIONS, partition_label
from edge_fl_server.recipes.hours import REFERENCES
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training.studies import with_network

ALWAYS = REFERENCES
"""Part of every comparison that does not leave them out, as the references for sharing and for personalisation."""

METHOD_SETTINGS = ("compression.", "privacy.")
"""Tables of a recipe that a single method of a comparison may set."""

IRRELEVANT = ("name", "compare", "methods", "release", "broker", "engine")  # for the numbers of one cell


class Cell(Struct, frozen=True):
    """One run of a comparison: the method as given (`label`), and the full recipe."""

    label: str
    recipe: Recipe

    @property
    def key(self) -> str:
        """Equal for recipes that give the same numbers: names, other methods of the comparison and paths do not count."""
        tree: dict[str, Any] = msgspec.to_builtins(self.recipe)
        relevant = {name: value for name, value in tree.items() if name not in IRRELEVANT}
        relevant["data"] = {name: value for name, value in tree["data"].items() if name != "data_dir"}
        return hashlib.blake2b(msgspec.json.encode(relevant, order="sorted"), digest_size=12).hexdigest()

    @property
    def block(self) -> tuple[str, str]:
        """(dataset, partition): cells of one block are compared with each other."""
        return self.recipe.data.dataset, partition_label(self.recipe.data)

    def __str__(self) -> str:
        return f"{self.label}, {', '.join(self.block)}, seed {self.recipe.seed}"


def cells(
    base: Recipe,
    methods: Sequence[str],
    datasets: Sequence[str] = (),
    partitions: Sequence[str] = (),
    seeds: int = 1,
    without: Sequence[str] = (),
) -> list[Cell]:
    """List all cells, seed by seed, without the methods of `without`; default dataset and partition: the recipe's.

    A method is a name, followed by options, "fedcrc:tau=0.9:kl=reverse", and by settings of compression and privacy,
    "fedcrc:compression.kind=int8". Raises MethodError and InputError.
    """
    if partitions and base.data.split:
        raise InputError("a split file and partitions, expected one of both")
    labels = list(dict.fromkeys([*ALWAYS, *methods]))
    if unknown := [label for label in without if label not in labels]:
        raise InputError(f"without {unknown[0]!r}: it is not compared{nearest(unknown[0], labels)}")
    if not (labels := [label for label in labels if label not in without]):
        raise InputError("no method is left to compare")
    chosen = [(label, *parse_method(label)) for label in labels]
    splits = [parse_partition(partition) for partition in partitions] or [[]]
    cells = []
    for dataset, split, seed in product(datasets or [base.data.dataset], splits, range(seeds)):
        setting = with_settings(base, [f'data.dataset="{dataset}"', *split, f"seed={base.seed + seed}"])
        given = stated_input(setting.data.dataset, Path(setting.data.data_dir))
        setting = with_network(setting, given.kind) if given else setting
        for label, name, options in chosen:
            own = with_settings(setting, parse_settings(label))
            cells.append(Cell(label, with_method(own, name, options)))
    return cells


def parse_method(label: str) -> tuple[str, dict[str, Option]]:
    """Split a label -> (name, options). Raises MethodError for an unknown name or option, or a value out of range.

    The name of a user's own method has a colon itself: "gentle:Gentle:step=0.2".
    """
    name, *pairs = label.split(":")
    if pairs and "=" not in pairs[0] and name.removesuffix("+ft") not in known_methods.METHODS:
        name = f"{name}:{pairs.pop(0)}"
    options = dict(_pair(label, pair) for pair in pairs if not pair.startswith(METHOD_SETTINGS))
    check_hypers(name, options, known_methods.hypers(name))
    return name, options


def parse_settings(label: str) -> list[str]:
    """The settings of compression and privacy in a label."""
    return [pair for pair in label.split(":")[1:] if pair.startswith(METHOD_SETTINGS)]


def parse_partition(text: str) -> list[str]:
    """Translate "dirichlet:0.1", "pathological:2", "domain" or "iid" to settings. Raises InputError."""
    kind, colon, number = text.partition(":")
    if kind not in PARTITIONS:
        raise InputError(f"partition {text!r}: unknown{nearest(kind, PARTITIONS)}")
    if not colon:
        return [f'data.partition="{kind}"']
    if not PARTITIONS[kind]:
        raise InputError(f"partition {text!r}: {kind} takes no number")
    return [f'data.partition="{kind}"', f"data.{PARTITIONS[kind][0]}={number}"]


def split_list(text: str) -> list[str]:
    """Split a comma-separated list. Raises InputError for an empty name."""
    items = [part.strip() for part in text.split(",")] if text else []
    if not all(items):
        raise InputError(f"{text!r}: an empty name between commas")
    return items


def blocks(cells: Iterable[Cell]) -> Iterator[tuple[tuple[str, str], list[Cell]]]:
    """Group cells by dataset and partition."""
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.block, []).append(cell)
    yield from grouped.items()


def trainings(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells whose rounds are the same."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(Cell("", rounds_of(cell.recipe)).key, []).append(cell)
    return list(grouped.values())


def rounds_of(recipe: Recipe) -> Recipe:
    """The recipe with the same rounds: that of NAME for NAME+ft, which only fine-tunes at the end, otherwise itself."""
    method = recipe.method
    if not method.name.endswith("+ft"):
        return recipe
    name, own = method.name.removesuffix("+ft"), hypers_of(FineTuned)
    options = {key: value for key, value in method.options.items() if key not in own}
    return msgspec.structs.replace(recipe, method=msgspec.structs.replace(method, name=name, options=options))


def _pair(label: str, pair: str) -> tuple[str, Option]:
    key, equals, value = pair.partition("=")
    if not equals:
        raise InputError(f"method {label!r}: {pair!r}, expected OPTION=VALUE")
    return key, parse_value(value)
