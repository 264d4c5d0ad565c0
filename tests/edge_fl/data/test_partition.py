"""A split gives every client its own train, validation and test images, the same on every machine, and survives the disk."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.data import datasets
from edge_fl.data.partition import (
    PARTITIONS,
    DataConfig,
    Split,
    cut,
    histogram,
    histogram_text,
    split_clients,
)
from edge_fl.data.samples import Dataset, Samples
from edge_fl.errors import DataError
from edge_fl.files import npz
from edge_fl.inputs import InputSpec

DIGITS = datasets.load("digits", Path("nowhere"))
FLEET = DataConfig(clients=12, beta=0.3)


def toy(n: int) -> Dataset:
    y = np.arange(n) % 2
    return Dataset("toy", Samples(np.zeros((n, 1, 2, 2), np.uint8), y), ("a", "b"), domains=y)


def every_index(split: Split) -> list[int]:
    return sorted(np.concatenate([*split.train, *split.validation, *split.test]).tolist())


@pytest.mark.parametrize("rule", ["dirichlet", "iid", "pathological"])
def test_train_validation_and_test_of_all_clients_are_the_whole_dataset_once(rule: str) -> None:
    split = split_clients(DIGITS, msgspec.structs.replace(FLEET, partition=rule), 0)
    assert every_index(split) == list(range(1797))
    assert split.clients == tuple(f"c{i:03d}" for i in range(12))


def test_split_sizes_follow_the_settings() -> None:
    split = split_clients(DIGITS, msgspec.structs.replace(FLEET, partition="iid", clients=4), 0)
    for train, validation, test in zip(split.train, split.validation, split.test, strict=True):
        owned = len(train) + len(validation) + len(test)
        assert len(test) == round(owned * 0.25)
        assert len(validation) == round((owned - len(test)) * 0.1)


@given(st.integers(2, 40), st.floats(0.01, 0.99), st.floats(0, 0.99))
def test_every_client_trains_and_tests_on_something(
    n: int, test_fraction: float, validation_fraction: float
) -> None:
    train, validation, test = cut(np.arange(n), test_fraction, validation_fraction)
    assert len(train) >= 1
    assert len(test) >= 1
    assert sorted([*train, *validation, *test]) == list(range(n))


def test_the_same_seed_gives_the_same_split_and_another_another() -> None:
    first, again, other = (every_row(split_clients(DIGITS, FLEET, seed)) for seed in (3, 3, 4))
    assert first == again != other


def every_row(split: Split) -> list[list[int]]:
    return [row.tolist() for part in (split.train, split.validation, split.test) for row in part]


def test_the_split_of_a_seed_never_changes() -> None:
    """Golden: runs made by earlier versions are compared with new ones on the same split."""
    split = split_clients(DIGITS, FLEET, 0)
    assert [len(rows) for rows in split.train] == [135, 102, 102, 101, 110, 101, 98, 73, 144, 36, 111, 101]
    assert split.test[0][:5].tolist() == [39, 73, 149, 265, 291]


def test_a_fraction_keeps_that_share_of_the_samples() -> None:
    split = split_clients(DIGITS, msgspec.structs.replace(FLEET, fraction=0.5), 0)
    assert len(every_index(split)) == len(set(every_index(split))) == round(1797 * 0.5)


def test_a_client_is_given_its_own_images() -> None:
    split = split_clients(DIGITS, FLEET, 0)
    data = split.client(DIGITS, "c003")
    assert np.array_equal(data.train.x, DIGITS.samples.x[split.train[3]])
    assert np.array_equal(data.test.y, DIGITS.samples.y[split.test[3]])
    with pytest.raises(DataError, match="did you mean 'c003'"):
        split.client(DIGITS, "c0003")
    with pytest.raises(DataError, match="6 samples, but the split is of 1797"):
        split.client(toy(6), "c003")


def test_by_domain_needs_domains() -> None:
    split = split_clients(toy(8), msgspec.structs.replace(FLEET, partition="domain", clients=2), 0)
    assert histogram(toy(8), split).tolist() == [[4, 0], [0, 4]]
    with pytest.raises(DataError, match="digits: no domains"):
        split_clients(DIGITS, msgspec.structs.replace(FLEET, partition="domain"), 0)


def test_a_client_with_one_sample_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DataError, match="1 sample for client c000, expected 2 or more; use fewer clients"):
        split_clients(toy(3), msgspec.structs.replace(FLEET, partition="iid", clients=3), 0)


def test_the_configuration_and_the_table_name_the_same_rules() -> None:
    (field,) = [f for f in msgspec.structs.fields(DataConfig) if f.name == "partition"]
    assert set(field.type.__args__) == set(PARTITIONS)


def test_a_saved_split_is_read_back_exactly(tmp_path: Path) -> None:
    split = split_clients(DIGITS, msgspec.structs.replace(FLEET, validation_fraction=0.0), 0)
    split.save(tmp_path / "split.npz")
    again = Split.load(tmp_path / "split.npz")
    assert (again.samples, again.clients) == (split.samples, split.clients)
    assert every_row(again) == every_row(split)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train", np.array([0, 1, 2, 3, 4, 99])),
        ("train", np.array([0, 0, 1, 2, 3, 4])),
        ("train", np.array([0.5] * 6)),
        ("train_ends", np.array([3, 2])),
        ("train_ends", np.array([6])),
        ("clients", np.array(["c000"])),
        ("samples", np.array([1, 2])),
    ],
)
def test_a_damaged_split_is_refused(tmp_path: Path, key: str, value: np.ndarray) -> None:
    path = tmp_path / "split.npz"
    split_clients(
        toy(8), msgspec.structs.replace(FLEET, partition="iid", clients=2, validation_fraction=0.0), 0
    ).save(path)
    npz.write(path, {**npz.read(path), key: value})
    with pytest.raises(DataError, match="split"):
        Split.load(path)


def test_the_histogram_counts_every_sample_of_every_client() -> None:
    split = split_clients(DIGITS, FLEET, 0)
    counts = histogram(DIGITS, split)
    assert counts.shape == (12, 10)
    assert counts.sum(axis=0).tolist() == DIGITS.samples.counts(10).tolist()
    text = histogram_text(DIGITS, split)
    assert len(text.splitlines()) == 13
    assert f"{counts[0].max()}" in text.splitlines()[1]


def test_many_classes_are_shown_as_dots() -> None:
    y = np.arange(40) % 20
    many = Dataset("many", Samples(np.zeros((40, 1, 2, 2), np.uint8), y), tuple(map(str, range(20))))
    lines = histogram_text(
        many, split_clients(many, msgspec.structs.replace(FLEET, partition="iid", clients=2), 0)
    ).splitlines()
    assert "0..19" in lines[0]
    assert "●" in lines[1]


def recordings(clients: int) -> Dataset:
    """40 recordings of 5 windows each, of four classes, by `clients` people."""
    groups = np.repeat(np.arange(40), 5)
    samples = Samples(np.zeros((200, 2, 3), np.float32), groups % 4, groups)
    given = InputSpec((2, 3), (0.0, 0.0), (1.0, 1.0), "CT", "float32", rate=1.0, hop=1)
    names = tuple(f"p{person}" for person in range(clients))
    return Dataset("steps", samples, tuple("abcd"), None, groups // 4 % clients, names, given)


@pytest.mark.parametrize("rule", ["dirichlet", "dirichlet-clients", "pathological", "domain", "iid"])
def test_no_split_cuts_a_group(rule: str) -> None:
    config = msgspec.structs.replace(FLEET, partition=rule, clients=4, beta=5.0)
    dataset = recordings(4)
    split = split_clients(dataset, config, 0)
    sets = [rows for part in (split.train, split.validation, split.test) for rows in part]
    homes = [np.unique(dataset.samples.groups[rows]) for rows in sets]
    assert sum(map(len, sets)) == 200 and len(np.concatenate(homes)) == 40
    if rule == "domain":
        assert all(len(np.unique(dataset.domains[rows])) == 1 for rows in sets if len(rows))


@pytest.mark.parametrize("seed", range(5))
def test_a_client_trains_every_class_that_it_is_tested_on(seed: int) -> None:
    dataset = recordings(4)
    split = split_clients(dataset, msgspec.structs.replace(FLEET, partition="domain", clients=4), seed)
    for train, test in zip(split.train, split.test, strict=True):
        trained, tested = (set(dataset.samples.y[rows].tolist()) for rows in (train, test))
        assert trained == {0, 1, 2, 3} and len(tested) == len(np.unique(dataset.samples.groups[test]))


def test_a_client_with_one_group_cannot_be_split() -> None:
    dataset = recordings(4)
    alone = replace(dataset, samples=replace(dataset.samples, groups=dataset.domains.astype(np.int64)))
    with pytest.raises(DataError, match=r"all \d+ samples of client c\d+ belong to one group"):
        split_clients(alone, msgspec.structs.replace(FLEET, partition="iid", clients=4), 0)
