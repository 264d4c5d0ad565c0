"""Columns are found in files as spreadsheets, loggers and apps write them; what cannot be read is named with its place."""

import io
from pathlib import Path

import numpy as np
import pytest

from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, columns
from edge_fl.modalities.limits import LIMITS, FileLimits

XY = InputSpec((2,), (0.0,), (1.0,), "F", "float32", names=("x", "y"))
EXPECTED = [[0.5, 1.5, -2.0], [1.0, 20.0, 300.0]]

FORMS = {
    "comma": "x,y\n0.5,1\n1.5,20\n-2,300\n",
    "no line end": "x,y\n0.5,1\n1.5,20\n-2,300",
    "excel": "X [g];Y (m/s²)\r\n0,5;1\r\n1,5;20\r\n-2;300\r\n\r\n",
    "excel's hint": "sep=;\nx;y\n0,5;1\n1,5;20\n-2;300\n",
    "tabs and decimal commas": "x\ty\n0,5\t1\n1,5\t2e1\n-2,0\t300\n",
    "spaces": "  x  y\n 0.5   1\n 1.5  20\n-2   300 \n",
    "spaces and decimal commas": "x y\n0,5 1\n1,5 20\n-2,0 300,0\n",
    "delimiter at the end": "x,y,\n0.5,1,\n1.5,20,\n-2,300,\n",
    "delimiter at the end of the data": "x,y\n0.5,1,\n1.5,20,\n-2,300,\n",
    "quotes": '"x","y"\n"0.5","1"\n"1.5","20"\n"-2","300"\n',
    "quoted decimal commas": 'x,y\n"0,5",1\n"1,5",20\n-2,300\n',
    "comments": "# a logger, 2.1\nx,y\n# began\n0.5,1\n1.5,20\n-2,300\n",
    "a program's remarks": "Logger 2.1\nserial no.,7\n\ny,time,x,z\n1,0,0.5,a\n20,1,1.5,b\n300,2,-2,c\n",
    "other columns, another order": "n,Y,note, X \n1,1,ok,0.5\n2,20,,1.5\n3,300,ok,-2\n",
    "no header": "0.5,1\n1.5,20\n-2,300\n",
    "no header, delimiter at the end": "0.5;1;\n1.5;20;\n-2;300;\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_form_of_csv_is_read(tmp_path: Path, form: str, encoding: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(FORMS[form].encode(encoding))
    assert columns.read(path, LIMITS).values(XY, ()).tolist() == EXPECTED
    columns.check(path)


def test_one_column_with_decimal_commas_is_no_two_columns() -> None:
    found = columns.read(io.BytesIO(b"power [W]\n0,5\n17,25\n"), LIMITS)
    assert (found.names, found.units) == (("power",), ("W",))
    assert found.values(None, ()).tolist() == [[0.5, 17.25]]


def test_empty_cells_and_those_of_a_row_that_was_cut_off_are_missing() -> None:
    content = b"x,y\n,1\nnan,2\nunavailable,3\n1e39,4\n5"
    assert np.isnan(columns.read(io.BytesIO(content), LIMITS).values(XY, ())).tolist() == [
        [True, True, True, True, False],
        [False, False, False, False, True],
    ]


REFUSED = {
    "text": (b"# one\nx,y\n1,2\n\n3,error\n", "text in a column of numbers", "line 5, column y: 'error'"),
    "mixed decimals": (b"x;y\n1.5;2\n1,5;3\n", "text in a column of numbers", "line 3, column x: '1,5'"),
    "missing": (b"x,Z\n1,2\n", "a column is missing", "'y'; the file has x, Z"),
    "twice": (b"x,y,X\n1,2,3\n", "two columns of one name", "'x'"),
    "decimal commas between commas": (
        b"x,y\n0,5,1,5\n2,2\n",
        "rows of different lengths",
        "line 2 has 4 cells",
    ),
    "no header, three columns": (
        b"1,2,3\n4,5,6\n",
        "another number of columns",
        "3 without names, expected 2",
    ),
    "empty": (b"", "empty", ""),
    "comments only": (b"# nothing\n\n", "empty", ""),
    "latin-1": ("x,y [°C]\n1,2\n".encode("latin-1"), "not a text in UTF-8", "line 1, column 6"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not a text in UTF-8", "line 1"),
    "a broken archive": (b"PK\3\4 and no more", "damaged", "BadZipFile"),
    "Parquet": (b"PAR1", "Parquet needs pip install pyarrow", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    content, reason, detail = REFUSED[case]
    with pytest.raises(UnusableFileError) as raised:
        columns.read(io.BytesIO(content), LIMITS).values(XY, ())
    assert raised.value.reason == reason  # nothing of the file
    assert detail in raised.value.detail


@pytest.mark.parametrize("numbers", [9, 5000])
def test_a_text_cell_is_found_in_any_block(numbers: int) -> None:
    content = "x,y\n" + "1,2\n" * numbers + "oh,3\n" + "1,2\n" * 5000
    with pytest.raises(UnusableFileError, match=f"line {numbers + 2}, column x: 'oh'"):
        columns.read(io.BytesIO(content.encode()), LIMITS).values(XY, ())


def archive(**arrays: object) -> io.BytesIO:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.transpose(EXPECTED)},
        {"x": np.array(EXPECTED), "names": ["x", "y"], "label": 3},
        {"y": EXPECTED[1], "X": EXPECTED[0]},
    ],
)
def test_arrays_are_columns(arrays: dict[str, object]) -> None:
    assert columns.read(archive(**arrays), LIMITS, 2).values(XY, ()).tolist() == EXPECTED


def test_an_archive_with_python_objects_or_without_a_recording_is_refused() -> None:
    with pytest.raises(UnusableFileError, match=r"damaged.*allow_pickle"):
        columns.read(archive(x=np.array([{}, {}], object)), LIMITS)
    with pytest.raises(UnusableFileError, match=r"no recording: holds a \[3\], b \[2\]"):
        columns.read(archive(a=np.zeros(3), b=np.zeros(2)), LIMITS)


def test_what_needs_more_memory_than_allowed_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("x,y\n" + "1,2\n" * 10_000)
    limits = FileLimits(max_decoding_bytes=100_000)
    columns.check(path, limits)  # its first lines are good
    for source in (path, archive(x=np.zeros((100_000, 2)))):  # 600 bytes, of 1.6 MB
        with pytest.raises(UnusableFileError, match="too large for this board"):
            columns.read(source, limits)


def test_the_head_of_a_long_file_is_checked_to_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("x,y,n\n" + ("1,2," + "ä" * 10 + "\n") * 5000)  # 64 KB end within a letter
    columns.check(path)
    path.write_text("nothing")
    columns.check(path)
    path.write_bytes(b"x,\xe4\n")
    with pytest.raises(UnusableFileError, match="not a text in UTF-8"):
        columns.check(path)


def test_a_file_that_is_gone_may_come_back(tmp_path: Path) -> None:
    with pytest.raises(UnusableFileError) as raised:
        columns.read(tmp_path / "none.csv", LIMITS)
    assert raised.value.passing
