"""The data of a run, as given: arrays or the name of a dataset, and which samples each client has."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from edge_fl import modalities
from edge_fl.data import datasets, partition, split_file
from edge_fl.data.partition import DataConfig, Split
from edge_fl.data.samples import Array, Dataset, Indices, Samples, as_groups, class_ids, numbered
from edge_fl.data.split_file import SETS, Rows
from edge_fl.errors import DataError, InputError
from edge_fl.files import npz
from edge_fl.inputs import InputSpec, Kind
from edge_fl_server.orchestrate import execution
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import studies
from edge_fl_server.training.studies import Study

Clients = int | str | Path | Split | ArrayLike | None
"""Their number, the client of each sample, or a split: an object or a file (`edge-fl simulate --save-split`)."""


@contextmanager
def nothing_run() -> Iterator[None]:
    """Errors of the block say that nothing was run."""
    try:
        yield
    except InputError as error:
        error.consequence = "nothing was run"
        raise


@dataclass(frozen=True)
class Data:
    """The data as given: the name of a dataset or samples (pictures without `input`), labels, separate test samples, clients, groups."""

    images: str | ArrayLike
    labels: ArrayLike | None = None
    test: Sequence[ArrayLike] | None = None
    clients: Clients = None
    input: InputSpec | None = None
    groups: ArrayLike | None = None

    def study(self, recipe: Recipe) -> Study:
        """Load or check the data, and split them over the clients. Raises DataError; warns of classes that cannot be learned."""
        with nothing_run():
            dataset = self._dataset(recipe.data)
            study = studies.of_dataset(recipe, dataset, self._rows(dataset, recipe))
        for line in partition.gaps(dataset, study.split):
            warnings.warn(line, stacklevel=3)
        return study

    def saved(self, recipe: Recipe, folder: Path) -> Recipe:
        """The recipe, checked, with the data in files: arrays and their clients are written to `folder`. Raises InputError."""
        study = self.study(recipe)
        execution.of_study(study)
        changes: dict[str, Any] = {}
        name = study.dataset.name
        if not isinstance(self.images, str):
            name = f"{name}-{study.dataset.fingerprint()[:8]}"
            _write(folder / f"{name}.npz", study.dataset)
            changes = {"dataset": name, "data_dir": os.fspath(folder)}
        if self._rows(study.dataset, recipe):
            path = folder / f"{name}-split-{study.split.fingerprint()[:8]}.csv"
            study.split.write_csv(path)
            changes |= {"split": os.fspath(path), "clients": len(study.split.clients)}
        return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, **changes))

    def settings(self) -> dict[str, Any]:
        """The settings of a recipe that follow from the data."""
        found: dict[str, Any] = {}
        if isinstance(self.images, str):
            found["data.dataset"] = self.images
        if self._number is not None:
            found["data.clients"] = self._number
        if isinstance(self.clients, str | Path):
            found["data.split"] = str(self.clients)
        return found

    @property
    def _number(self) -> int | None:
        """The number of clients, if that is given."""
        given = self.clients
        return int(given) if isinstance(given, int | np.integer) and not isinstance(given, bool) else None

    def _dataset(self, settings: DataConfig) -> Dataset:
        if isinstance(self.images, str):
            if any(given is not None for given in (self.labels, self.test, self.input, self.groups)):
                raise DataError(
                    f"dataset {self.images!r} with labels, test samples, an input or groups, expected either a name or arrays"
                )
            return datasets.load(settings.dataset, Path(settings.data_dir))
        if self.labels is None:
            raise DataError("arrays: samples without labels, expected both, or the name of a dataset")
        kind = self.input.kind if self.input else "picture"
        words = modalities.ABOUT[kind].samples
        parts = [_samples("arrays", self.images, self.labels, kind)]
        if self.test is not None:
            if len(self.test) not in (2, 3):
                raise DataError(
                    f"test: {len(self.test)} values, expected (images, labels) or (images, labels, clients)"
                )
            parts.append(_samples("test arrays", self.test[0], self.test[1], kind))
        if len({part.shape for part in parts}) > 1:
            shapes = " and ".join(str(list(part.shape)) for part in parts)
            raise DataError(f"arrays and test arrays: {words} of {shapes}, expected one shape")
        if self.input and self.input.shape != parts[0].shape:
            raise DataError(
                f"arrays: {words} of {list(parts[0].shape)}, but the input says {list(self.input.shape)}"
            )
        x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
        groups = None
        if self.groups is not None:
            alone = np.full(sum(map(len, parts[1:])), "")  # separate test samples
            groups = np.concatenate([np.ravel(np.asarray(self.groups)).astype(str), alone])
        held_out = None if self.test is None else np.repeat([False, True], [len(part) for part in parts])
        samples = Samples(x, y, as_groups(groups, len(y), "arrays"))
        return Dataset("arrays", samples, numbered([y]), held_out, given=self.input)

    def _rows(self, dataset: Dataset, recipe: Recipe) -> Rows | None:
        """The sets of each client, if the data say more than the recipe."""
        if isinstance(self.clients, Split):
            if self.clients.samples != len(dataset.samples):
                raise DataError(
                    f"clients: a split of {self.clients.samples} samples for {len(dataset.samples)}"
                )
            sets = [getattr(self.clients, part) for part in SETS]
            return {
                client: dict(zip(SETS, rows, strict=True))
                for client, *rows in zip(self.clients.clients, *sets, strict=True)
            }
        if (owned := self._owned(dataset, recipe)) is None:
            return None
        separate = self.test is not None
        return {
            client: dict(zip(SETS, _sets(dataset, recipe, client, rows, separate), strict=True))
            for client, rows in owned.items()
        }

    def _owned(self, dataset: Dataset, recipe: Recipe) -> dict[str, Indices] | None:
        """The samples of each client: of the given clients, or drawn where the test samples are separate; else None."""
        drawn = self.clients is None or self._number is not None
        if isinstance(self.clients, str | Path) or (drawn and self.test is None):
            return None
        if drawn:
            every = np.arange(len(dataset.samples))
            shares = partition.assigned(dataset, every, recipe.data, recipe.seed)
            return {_numbered(number, len(shares) - 1): share for number, share in enumerate(shares)}
        trained = (
            len(dataset.samples) if self.test is None else int(np.sum(~cast(Array, dataset.original_test)))
        )
        ids = _ids("clients", self.clients, trained)
        if self.test is not None:
            if len(self.test) != 3:
                raise DataError(
                    "test: no clients, expected (images, labels, clients), because the other samples have clients"
                )
            ids = np.concatenate([ids, _ids("test clients", self.test[2], len(dataset.samples) - trained)])
        names = {
            id: _numbered(id, int(ids.max())) if ids.dtype.kind in "iu" else str(id) for id in np.unique(ids)
        }
        for name in names.values():
            if not split_file.CLIENT.fullmatch(name):
                raise DataError(f"client {name!r}, expected 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
        return {
            name: np.flatnonzero(ids == id) for id, name in sorted(names.items(), key=lambda pair: pair[1])
        }


def _samples(where: str, images: ArrayLike, labels: ArrayLike, kind: Kind) -> Samples:
    try:
        x, y = np.asarray(images), np.asarray(labels)
    except ValueError as error:
        raise DataError(f"{where}: not an array ({error}); expected samples of one shape") from error
    if not len(np.atleast_1d(y)):
        raise DataError(f"{where}: no samples")
    ids = class_ids(y, where)
    return Samples.of(x, ids, numbered([ids]), where, kind)


def _ids(what: str, clients: Any, samples: int) -> Array:
    ids = np.asarray(clients)
    if isinstance(clients, bool) or ids.shape != (samples,) or ids.dtype.kind not in "iuU":
        raise DataError(
            f"{what}: {ids.dtype} {list(ids.shape)}, expected a number or name for each of the {samples} samples"
        )
    if ids.dtype.kind in "iu" and ids.min() < 0:
        raise DataError(f"{what}: {ids.min()} at index {ids.argmin()}, expected 0 or more")
    return ids


def _sets(
    dataset: Dataset, recipe: Recipe, client: str, rows: Indices, separate: bool
) -> tuple[Indices, Indices, Indices]:
    """Divide a client's samples into train, validation and test; `separate` test samples stay test samples."""
    first, whole = partition.units(dataset.samples.groups, rows)
    labels, are_groups = dataset.samples.y[rows[first]], len(first) < len(rows)
    order = partition.shuffled(recipe.seed, client, labels, are_groups)
    if not separate:
        _require(client, "", len(order), 2)
        train, validation, test = partition.cut(
            order, recipe.data.test_fraction, recipe.data.validation_fraction
        )
        return rows[whole(train)], rows[whole(validation)], rows[whole(test)]
    held_out = cast(Array, dataset.original_test)[rows[first[order]]]
    train, test = order[~held_out], order[held_out]
    for kind, part in (("training ", train), ("test ", test)):
        _require(client, kind, len(part), 1)
    count = min(round(len(train) * recipe.data.validation_fraction), len(train) - 1)
    return rows[whole(train[count:])], rows[whole(train[:count])], rows[whole(test)]


def _require(client: str, kind: str, count: int, least: int) -> None:
    if count < least:
        raise DataError(
            f"client {client}: {count} {kind}samples, expected {least} or more; use fewer clients or another partition"
        )


def _numbered(number: int, largest: int) -> str:
    return f"c{number:0{max(3, len(str(largest)))}d}"


def _write(path: Path, dataset: Dataset) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples, held_out = dataset.samples, dataset.original_test
    every = {"x": samples.x, "y": samples.y, **({"groups": samples.groups} if len(samples.groups) else {})}
    content = every
    if held_out is not None:
        parts = (("train", ~held_out), ("test", held_out))
        content = {f"{name}_{part}": array[mask] for part, mask in parts for name, array in every.items()}
    if dataset.given:
        content["input"] = np.array(msgspec.json.encode(dataset.given).decode())
    npz.write(path, {**content, "classes": np.array(dataset.classes)}, compress=False)
