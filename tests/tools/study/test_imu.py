"""The study of exercises by a watch: labels and tests share no value, and no value of the tenth person is trained on."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from edge_fl.data import datasets
from edge_fl.data.samples import Dataset
from edge_fl.errors import DataError
from edge_fl.files import npz
from tools.study import imu

LENGTH = 1500
"""Values of a recording."""


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Ten persons with seven exercises on both arms; the first channel of a recording counts up, and tells windows apart."""
    recordings, rng = [], np.random.default_rng(0)
    for person in range(10):
        for exercise in range(7):
            for side in imu.SIDES:
                values = rng.normal(person, 1, (LENGTH, 6)).astype(np.float32)
                values[:, 0] = np.arange(LENGTH) + 10_000 * len(recordings)
                recordings.append(imu.Recording(f"person{person:02d}", f"e{exercise}", side, values))
    npz.write(tmp_path / "watch.npz", imu.windows(recordings))
    return datasets.load("watch", tmp_path)


@pytest.mark.parametrize("test", imu.TESTS)
def test_what_is_tested_shares_no_value_with_the_labels(dataset: Dataset, test: str) -> None:
    labelled, tests = imu.starts(dataset, 3, 0, test)
    x, y = dataset.samples.x, dataset.samples.y
    assert not np.intersect1d(x[labelled[10], 0], x[tests, 0]).size
    for k, rows in labelled.items():
        assert np.bincount(y[rows], minlength=7).tolist() == [k] * 7
        assert (dataset.domains is not None) and {*dataset.domains[[*rows, *tests]]} == {3}
    assert {*labelled[1]} <= {*labelled[3]} <= {*labelled[10]}


def test_nothing_of_the_tenth_person_is_trained_on(dataset: Dataset) -> None:
    found = imu.trained(imu.KERNELS, dataset, 9, 0, 1)
    mean = found.method.net.input.mean[1]
    assert mean == pytest.approx(np.mean(range(9)), abs=0.05)


def test_an_object_in_the_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"posix\.system.*nothing was read"):
        imu._Restricted(BytesIO(b"cposix\nsystem\n(S'true'\ntR.")).load()
