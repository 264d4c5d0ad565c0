"""Rows of a CSV file become samples with a class and a group; what is left out is named."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl import modalities
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, tables

FLOWERS = """"petal [cm]";species;site;"sepal [cm]"
1,5;red;north;4
2,5;"blue";south;5

1,5;red;south;
3,5;;north;6
4,5; red ;north;7
5,5;green;north;8
"""


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    path = tmp_path / "flowers.csv"
    path.write_text(FLOWERS)
    return path


def test_rows_have_classes_and_groups(flowers: Path) -> None:
    input, classes = tables.propose([flowers])
    assert (input.shape, input.names, classes) == ((2,), ("petal", "sepal"), ("blue", "green", "red"))
    found = tables.rows(flowers, input)
    assert found.classes == classes
    assert found.x.tolist() == [[1.5, 4], [2.5, 5], [4.5, 7], [5.5, 8]]
    assert [classes[label] for label in found.y] == ["red", "blue", "red", "green"]
    assert found.groups == ("north", "south", "north", "north")
    assert found.remarks == (
        "1 rows with an empty cell are left out, the first in line 5",
        "1 rows of other classes, '', are left out",
    )


def test_rows_of_classes_outside_the_list_are_left_out(flowers: Path) -> None:
    found = tables.rows(flowers, None, ("red", "blue"))
    assert found.y.tolist() == [0, 1, 0]
    assert found.remarks[1] == "2 rows of other classes, '', 'green', are left out"


def test_the_class_column_is_named_or_the_last_text_column(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b,c,state\n10,1,x,p\n9,2,y,q\n")
    assert tables.rows(path).classes == ("p", "q")
    path.write_text("a,b,c,site\n10,1,x,p\n9,2,y,q\n")
    assert tables.rows(path)[2:4] == (("p", "q"), ("x", "y"))
    named = tables.rows(path, None, (), "A ")
    assert (named.classes, named.x.tolist(), named.y.tolist()) == (("9", "10"), [[1], [2]], [1, 0])
    path.write_text("Target,b\n1,5\n0,6\n")
    assert tables.rows(path).y.tolist() == [1, 0]
    with pytest.raises(UnusableFileError, match="a column is missing: 'kind'; the file has Target, b"):
        tables.rows(path, None, (), "kind")
    path.write_text("a,b\n1,5\n")
    with pytest.raises(UnusableFileError, match="no class column"):
        tables.rows(path)
    path.write_text("5.1,3.5,setosa\n4.9,3.0,virginica\n")
    assert tables.rows(path, tables.propose([path])[0]).x.tolist() == pytest.approx(
        np.array([[5.1, 3.5], [4.9, 3]])
    )


def test_a_file_of_a_class_folder_is_read_without_a_class_column(tmp_path: Path) -> None:
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.write_text("a,b\n1,2\n3,\n5,6\n")
    other.write_text("b,a,note\n2,1,\n")
    input, classes = tables.propose([one, other])
    assert (input.names, classes) == (("a", "b"), ())
    assert tables.read(one, input).samples.tolist() == [[1, 2], [5, 6]]
    assert tables.read(other, input).samples.tolist() == [[1, 2]]
    other.write_text("b,c\n2,1\n")
    third = tmp_path / "third.csv"
    third.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"other\.csv: no column of numbers a, as other files have"):
        tables.propose([one, other, third])
    with pytest.raises(UnusableFileError, match="a column is missing: 'a'; the file has b, c"):
        tables.read(other, input)


def test_arrays_of_another_width_are_refused() -> None:
    input = InputSpec((3,), axes="F", dtype="float32")
    x = np.random.default_rng(0).normal(2, 3, (20, 3))
    found = tables.input_of(tables.fit(x, input, "data"), np.arange(10), input)
    np.testing.assert_allclose(found.std, x[:10].std(0), rtol=1e-5)
    with pytest.raises(DataError, match=r"data: samples \[2\], the extractor takes \[3\] \[F\]"):
        tables.fit(x[:, :2], input, "data")
    with pytest.raises(DataError, match=r"data: rows \[20\], expected \[N, F\]"):
        tables.arrays(x[:, 0], "data")


def test_tables_are_a_modality() -> None:
    found = modalities.of("table")
    assert all(hasattr(found, name) for name in modalities.Modality.__dict__ if not name.startswith("_"))
    input = InputSpec((2,), (5.0, -1.0), (2.0, 0.1), axes="F", dtype="float32")
    rows = found.synthetic(input, 500, 0)
    np.testing.assert_allclose(rows.mean(0), input.mean, atol=0.3)
    np.testing.assert_allclose(rows.std(0), input.std, rtol=0.1)
