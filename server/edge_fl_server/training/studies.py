"""A study: a recipe with its dataset and the split of the dataset over clients. Methods are compared on the same study."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from edge_fl import models
from edge_fl.config import MethodConfig, MethodSpec
from edge_fl.data import datasets, partition, pictures, split_file
from edge_fl.data.class_names import require_class_names
from edge_fl.data.samples import ClientData, Dataset, Samples
from edge_fl.errors import ConfigError, DataError
from edge_fl.inputs import InputSpec
from edge_fl.methods import PRETRAINED
from edge_fl.seeds import generator
from edge_fl_server.recipes.recipe import Recipe


@dataclass(frozen=True)
class Study:
    """A recipe, its dataset, and which images each client has."""

    recipe: Recipe
    dataset: Dataset = field(repr=False)
    split: partition.Split = field(repr=False)

    @property
    def spec(self) -> MethodSpec:
        return method_spec(
            self.recipe, declared_input(self.recipe) or self.dataset.input, self.dataset.classes
        )

    @property
    def unseen(self) -> tuple[str, ...]:
        """The clients that never train; usually none."""
        return draw_unseen(self.split.clients, self.recipe.data.unseen, self.recipe.seed)

    def data(self) -> dict[str, ClientData]:
        """The data of the clients that train, by client."""
        return self._of(set(self.split.clients) - set(self.unseen))

    def unseen_data(self) -> dict[str, ClientData]:
        """The data of the clients that never train, by client."""
        return self._of(set(self.unseen))

    def _of(self, clients: set[str]) -> dict[str, ClientData]:
        return {id: self.split.client(self.dataset, id) for id in self.split.clients if id in clients}

    def fingerprint(self) -> str:
        """sha256 over the dataset and its split."""
        both = self.dataset.fingerprint() + self.split.fingerprint()
        return hashlib.sha256(both.encode()).hexdigest()

    def histogram(self) -> str:
        """Samples per client and class, as text, then a line about classes that nothing can be learned of."""
        lines = [
            partition.histogram_text(self.dataset, self.split),
            *partition.gaps(self.dataset, self.split),
        ]
        return "\n".join(lines)

    def with_method(self, method: msgspec.Struct) -> "Study":
        """The same data and split with another method."""
        return Study(msgspec.structs.replace(self.recipe, method=method), self.dataset, self.split)


def draw_unseen(clients: Sequence[str], count: int, seed: int) -> tuple[str, ...]:
    """Draw `count` clients that never train, ascending. Raises DataError if no client would be left."""
    if not count:
        return ()
    if count >= len(clients):
        raise DataError(f"[data] unseen = {count} of {len(clients)} clients, expected fewer")
    chosen = generator(seed, "unseen").choice(len(clients), size=count, replace=False)
    return tuple(sorted(clients[row] for row in chosen))


def prepare(recipe: Recipe) -> Study:
    """Load the dataset and split it. Raises DataError."""
    return of_dataset(recipe, datasets.load(recipe.data.dataset, Path(recipe.data.data_dir)))


def of_dataset(recipe: Recipe, dataset: Dataset, given: split_file.Rows | None = None) -> Study:
    """Split a loaded dataset; a split that is given (`given`, or a file) determines the recipe's number of clients. Raises DataError.

    The images are resized if the recipe or its backbone declares another input.
    """
    dataset = _resized(dataset, declared_input(recipe))
    split = partition.split_clients(dataset, recipe.data, recipe.seed, given)
    data = msgspec.structs.replace(recipe.data, clients=len(split.clients))
    return Study(msgspec.structs.replace(recipe, data=data), dataset, split)


def method_spec(recipe: Recipe, input: InputSpec, classes: Sequence[str]) -> MethodSpec:
    """The specification from which any process builds the recipe's method for this input and these classes."""
    return MethodSpec(
        model=models.with_pinned_weights(recipe.model),
        input=input,
        classes=list(classes),
        method=recipe.method,
        seed=recipe.seed,
        compression=recipe.compression,
        privacy=recipe.privacy,
        rounds=recipe.rounds,
        evaluate_every=recipe.evaluate_every,
    )


def declared_input(recipe: Recipe) -> InputSpec | None:
    """The input that the recipe or its backbone declares; None where it is that of the dataset's images."""
    return recipe.input or models.backbone_input(recipe.model)


def without_data(recipe: Recipe) -> tuple[Recipe, MethodSpec]:
    """The recipe of a run whose data are only on devices, resolved, and its specification. Raises InputError.

    Classes and input are those that the recipe declares. With source "fleet" and without classes they are those of the recipe's dataset.
    """
    if recipe.source == "none":
        method = MethodConfig(PRETRAINED)
        recipe = msgspec.structs.replace(recipe, rounds=0, method=method)
    elif not recipe.data.classes:
        dataset = datasets.load(recipe.data.dataset, Path(recipe.data.data_dir))
        return recipe, method_spec(recipe, declared_input(recipe) or dataset.input, dataset.classes)
    where = f"source {recipe.source!r}"
    if not recipe.data.classes:
        raise ConfigError(f'{where}: expected the class names, [data] classes = ["cat", "dog"]')
    require_class_names(recipe.data.classes, f"{where}, [data] classes")
    input = declared_input(recipe)
    if input is None:
        raise ConfigError(
            f"{where}: model {recipe.model.name!r} declares no input; expected [input] shape = [3, 64, 64], or a backbone as model"
        )
    recipe = msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, dataset=""))
    return recipe, method_spec(recipe, input, recipe.data.classes)


def _resized(dataset: Dataset, input: InputSpec | None) -> Dataset:
    if input is None or input.shape == dataset.samples.shape:
        return dataset
    samples = Samples(pictures.fit(dataset.samples.x, input), dataset.samples.y)
    return replace(dataset, samples=samples)
