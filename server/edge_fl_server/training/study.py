"""A study: a recipe with its dataset and the split of the dataset over clients. Methods are compared on the same study."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from edge_fl.config import MethodSpec, Recipe
from edge_fl.data import datasets, partition, split_file
from edge_fl.data.samples import ClientData, Dataset
from edge_fl_server.training import newcomers


@dataclass(frozen=True)
class Study:
    """A recipe, its dataset, and which images each client has."""

    recipe: Recipe
    dataset: Dataset = field(repr=False)
    split: partition.Split = field(repr=False)

    @property
    def spec(self) -> MethodSpec:
        return method_spec(self.recipe, self.dataset)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The clients that never train; usually none."""
        return newcomers.draw(self.split.clients, self.recipe.data.unseen, self.recipe.seed)

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

    def with_method(self, method: msgspec.Struct) -> Study:
        """The same data and split with another method."""
        return Study(msgspec.structs.replace(self.recipe, method=method), self.dataset, self.split)


def prepare(recipe: Recipe) -> Study:
    """Load the dataset and split it. Raises DataError."""
    return of_dataset(recipe, datasets.load(recipe.data.dataset, Path(recipe.data.data_dir)))


def of_dataset(recipe: Recipe, dataset: Dataset, given: split_file.Rows | None = None) -> Study:
    """Split a loaded dataset; a split that is given (`given`, or a file) determines the recipe's number of clients. Raises DataError."""
    split = partition.split_clients(dataset, recipe.data, recipe.seed, given)
    data = msgspec.structs.replace(recipe.data, clients=len(split.clients))
    return Study(msgspec.structs.replace(recipe, data=data), dataset, split)


def method_spec(recipe: Recipe, dataset: Dataset) -> MethodSpec:
    """The specification from which any process builds the recipe's method for a dataset."""
    return MethodSpec(
        model=recipe.model,
        input=dataset.input,
        classes=list(dataset.classes),
        method=recipe.method,
        seed=recipe.seed,
        compression=recipe.compression,
        privacy=recipe.privacy,
        rounds=recipe.rounds,
        evaluate_every=recipe.evaluate_every,
    )
