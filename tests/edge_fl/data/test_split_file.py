"""A split file gives back the split that was saved; anything else than a whole split is one line, with its place."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl.data import datasets, split_file
from edge_fl.data.partition import DataConfig, gaps, split_clients
from edge_fl.data.samples import Dataset, Samples
from edge_fl.errors import DataError

DIGITS = datasets.load("digits", Path("nowhere"))
WHOLE = "sample,client,set\n0,a,train\n1,a,test\n2,b,train\n3,b,validation\n4,b,test\n5,,unused\n"


def toy(n: int = 6, classes: tuple[str, ...] = ("0", "1")) -> Dataset:
    return Dataset("toy", Samples(np.zeros((n, 1, 2, 2), np.uint8), np.arange(n) % 2), classes)


def read(tmp_path: Path, text: str, **settings: object) -> object:
    path = tmp_path / "split.csv"
    path.write_text(text)
    return split_clients(toy(), DataConfig(split=str(path), **settings), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{}, {"fraction": 0.5}, {"validation_fraction": 0.0}, {"max_train": 7, "shots": 2}]
)
def test_a_saved_split_is_read_back_exactly(tmp_path: Path, settings: dict[str, float]) -> None:
    drawn = split_clients(DIGITS, DataConfig(**settings), 3)  # type: ignore[arg-type]
    drawn.write_csv(tmp_path / "new" / "split.csv")
    again = split_clients(DIGITS, DataConfig(split=str(tmp_path / "new" / "split.csv")), 9)
    assert again.fingerprint() == drawn.fingerprint()
    assert split_clients(DIGITS, DataConfig(**settings), 4).fingerprint() != drawn.fingerprint()  # type: ignore[arg-type]


def test_columns_may_be_in_any_order_and_clients_have_any_name(tmp_path: Path) -> None:
    split = read(tmp_path, "\ufeffset,sample,client\r\ntrain,5,f0000_14\r\n" + "".join(
        f"{part},{n},{who}\r\n" for n, (who, part) in enumerate(
            [("f0000_14", "test"), ("B.2", "train"), ("B.2", "test"), ("B.2", "validation"), ("", "unused")]
        )
    ))  # fmt: skip
    assert split.clients == ("B.2", "f0000_14")  # type: ignore[attr-defined]
    assert [rows.tolist() for rows in split.train] == [[1], [5]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("4,b,test\n", "4,b,test\n4,a,test\n"),
            "line 7: sample 4 again, after line 6; expected every sample once",
        ),
        (("5,,unused\n", "6,,unused\n"), r"line 7: sample 6, but toy has the samples 0\.\.5"),
        (("5,,unused\n", ""), "1 of the 6 samples of toy are missing, the first is 5; .* 'unused'"),
        (("2,b,train\n", "2,b,trian\n"), r"line 4: set 'trian' is unknown \(did you mean 'train'\?\)"),
        (("2,b,train\n", "x,b,train\n"), "line 4: sample 'x', expected a whole number"),
        (("2,b,train\n", "2,,train\n"), "line 4: client '', expected 1 to 64"),
        (("2,b,train\n", "2,b,train,9\n"), "line 4: 4 fields, expected 3"),
        (("2,b,train\n", "2,b,validation\n"), "client b has no sample in the set 'train'"),
        (("sample,client,set", "index,user,set"), "columns index, user, set; expected a CSV file"),
        ((WHOLE, ""), "columns none; expected a CSV file"),
        ((WHOLE, "sample,client,set\n" + "".join(f"{n},,unused\n" for n in range(6))), "no client"),
    ],
)
def test_anything_else_is_one_line_that_names_the_place(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    read(tmp_path, WHOLE)
    with pytest.raises(DataError, match=message) as raised:
        read(tmp_path, WHOLE.replace(*change))
    assert "split.csv" in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.csv: cannot be read"):
        split_file.read(tmp_path / "missing.csv", "toy", 6)
    (tmp_path / "binary.csv").write_bytes(b"sample,client,set\n\xff\xfe")
    with pytest.raises(DataError, match=r"binary\.csv: not a CSV file"):
        split_file.read(tmp_path / "binary.csv", "toy", 6)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        split_file.write(tmp_path / "file" / "split.csv", 6, [], {})


def test_a_share_of_the_data_and_a_split_file_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fraction = 0\.5 with a given split, expected 1"):
        read(tmp_path, WHOLE, fraction=0.5)


def test_few_shots_limit_the_training_samples_of_each_class() -> None:
    split = split_clients(DIGITS, DataConfig(shots=3), 0)
    whole = split_clients(DIGITS, DataConfig(), 0)
    for few, every, test, tests in zip(split.train, whole.train, split.test, whole.test, strict=True):
        expected = np.minimum(np.bincount(DIGITS.samples.y[every], minlength=10), 3)
        assert np.bincount(DIGITS.samples.y[few], minlength=10).tolist() == expected.tolist()
        assert test.tolist() == tests.tolist()
    limited = split_clients(DIGITS, DataConfig(shots=3, max_train=5), 0)
    assert max(map(len, limited.train)) == 5


def test_classes_that_nothing_can_be_learned_of_are_reported(tmp_path: Path) -> None:
    data = toy(6, ("0", "1", "2"))
    path = tmp_path / "split.csv"
    path.write_text("sample,client,set\n0,a,train\n1,a,test\n2,a,train\n3,a,test\n4,a,test\n5,a,test\n")
    split = split_clients(data, DataConfig(split=str(path)), 0)
    assert gaps(data, split) == [
        "toy: no samples of 1 of 3 classes: 2",
        "toy: no training samples at any client of 1 of 3 classes: 1",
    ]
    assert gaps(toy(), split_clients(toy(), msgspec.structs.replace(DataConfig(), clients=1), 0)) == []
