"""A study: a recipe with its dataset and the split of the dataset over clients. Methods are compared on the same study.

Its clients can be stored for any process: the method's spec, all samples once, and the split. A store is written to a folder once; any
number of processes memory-map its samples. Clients are built on access.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from edge_fl import modalities, models
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.data import datasets, partition, split_file
from edge_fl.data.class_names import require_class_names
from edge_fl.data.partition import Split
from edge_fl.data.samples import Array, ClientData, Dataset, Labels, Samples
from edge_fl.errors import ConfigError, DataError, shortened
from edge_fl.inputs import InputSpec, Kind
from edge_fl.methods import PRETRAINED
from edge_fl.methods.contract.client import Client
from edge_fl.modalities import ABOUT
from edge_fl.seeds import generator
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training.clients import ClientId

X, Y, SPLIT, SETTINGS = "x.npy", "y.npy", "split.npz", "settings.json"
NETWORKS: dict[Kind, str] = {"series": "cnn1d", "audio": "audio-cnn", "table": "mlp"}
"""The network of a recipe that names none, by the kind of its samples, if these are not pictures."""


@dataclass(frozen=True)
class Study:
    """A recipe, its dataset, and which samples each client has."""

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
        return partition.described(self.dataset, self.split)

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

    Pictures are resized if the recipe or its backbone declares another input.
    """
    recipe = with_network(recipe, dataset.kind)
    dataset = _fitted(dataset, declared_input(recipe))
    split = partition.split_clients(dataset, recipe.data, recipe.seed, given)
    data = msgspec.structs.replace(recipe.data, clients=len(split.clients))
    return Study(msgspec.structs.replace(recipe, data=data), dataset, split)


def with_network(recipe: Recipe, kind: Kind) -> Recipe:
    """The recipe with the network of a kind of samples, if it names none."""
    if kind == "picture" or recipe.model.name != ModelConfig().name:
        return recipe
    model = msgspec.structs.replace(recipe.model, name=NETWORKS[kind])
    return msgspec.structs.replace(recipe, model=model)


def method_spec(recipe: Recipe, input: InputSpec, classes: Sequence[str]) -> MethodSpec:
    """The specification from which any process builds the recipe's method for this input and these classes. Raises ConfigError."""
    if recipe.method.name == PRETRAINED and recipe.source != "none":
        raise ConfigError(
            f'method {PRETRAINED!r} with source {recipe.source!r}: it trains nothing; expected source = "none", or another method'
        )
    if input.kind != "picture" and recipe.method.augment != "none":
        raise ConfigError(
            f'[method] augment = "{recipe.method.augment}" changes pictures, not {ABOUT[input.kind].samples}; expected "none"'
        )
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
    """The input that the recipe or its backbone declares; None where it is that of the dataset's samples."""
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
        recipe = with_network(recipe, dataset.kind)
        return recipe, method_spec(recipe, declared_input(recipe) or dataset.input, dataset.classes)
    if recipe.input:
        recipe = with_network(recipe, recipe.input.kind)
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


def _fitted(dataset: Dataset, input: InputSpec | None) -> Dataset:
    own = dataset.given
    if input is None or (own is None and input.shape == dataset.samples.shape):
        return dataset
    others = own and own.names and input.names and own.names != input.names
    if own and (others or (own.kind, own.rate) != (input.kind, input.rate)):
        names = f", channels {shortened(input.names)} instead of {shortened(own.names)}" * bool(others)
        raise DataError(f"{dataset.name}: {own.form}, but the recipe or its model takes {input.form}{names}")
    x = modalities.of(dataset.kind).fit(dataset.samples.x, input, dataset.name)
    return replace(dataset, samples=replace(dataset.samples, x=x))


class ClientSettings(msgspec.Struct, frozen=True):
    """The method spec and the ids of the clients that train."""

    spec: MethodSpec
    clients: tuple[ClientId, ...]
    precision: str = "fp32"


@dataclass(frozen=True, eq=False)
class ClientStore(Mapping[ClientId, Client]):
    """The clients of a run by id, each built on access from its rows of `x` [N, ...] and `y` [N]."""

    settings: ClientSettings
    x: Array
    y: Labels
    split: Split
    device: str = "cpu"

    @classmethod
    def of(cls, study: Study, device: str = "cpu") -> "ClientStore":
        """The store of a study's training clients."""
        trained = tuple(id for id in study.split.clients if id not in set(study.unseen))
        samples = study.dataset.samples
        return cls(
            ClientSettings(study.spec, trained, study.recipe.precision),
            samples.x,
            samples.y,
            study.split,
            device,
        )

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> "ClientStore":
        """Open a saved store; samples are memory-mapped."""
        settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=ClientSettings)
        x, y = np.load(folder / X, mmap_mode="r"), np.load(folder / Y)
        return cls(settings, x, y, Split.load(folder / SPLIT), device)

    def save(self, folder: Path) -> None:
        """Write the store into a folder."""
        np.save(folder / X, self.x)
        np.save(folder / Y, self.y)
        self.split.save(folder / SPLIT)
        (folder / SETTINGS).write_bytes(msgspec.json.encode(self.settings))

    def samples(self, id: ClientId) -> int:
        """Number of training samples of a client."""
        return len(self.split.train[self._rows[id]])

    def __getitem__(self, id: ClientId) -> Client:
        row, spec = self._rows[id], self.settings.spec
        parts = (self.split.train[row], self.split.validation[row], self.split.test[row])
        data = ClientData(*(Samples(np.asarray(self.x[rows]), self.y[rows]) for rows in parts))
        precision = self.settings.precision
        return Client(id, data, len(spec.classes), spec.method.batch_size, spec.seed, self.device, precision)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.settings.clients)

    def __len__(self) -> int:
        return len(self.settings.clients)

    @cached_property
    def _rows(self) -> Mapping[ClientId, int]:
        return {id: row for row, id in enumerate(self.split.clients)}
