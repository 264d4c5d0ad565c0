"""Files that people write are read in the encodings of their editors, or the error says where and what to do."""

from pathlib import Path

import pytest

from edge_fl import toml
from edge_fl.data import split_file
from edge_fl.errors import ConfigError, DataError
from edge_fl.files import user_text
from edge_fl.files.user_text import EncodingError

TEXT = '[data]\r\n\tclasses = ["müll",\t"glas"]\r\n'
ENCODED = {
    "UTF-8": TEXT.encode(),
    "UTF-8 with a byte order mark": TEXT.encode("utf-8-sig"),
    "UTF-16, as Notepad writes it": b"\xff\xfe" + TEXT.encode("utf-16-le"),
    "UTF-16, the other way round": b"\xfe\xff" + TEXT.encode("utf-16-be"),
    "line ends of Unix": TEXT.replace("\r\n", "\n").encode(),
    "line ends of old Macs": TEXT.replace("\r\n", "\r").encode(),
}
WRONG = {
    "latin-1": (TEXT.encode("latin-1"), "line 2, column 15 is not UTF-8: save the file as UTF-8"),
    "cut in a character": ("a = 'ü".encode()[:-1], "line 1, column 6 is not UTF-8: save"),
    "UTF-16 without a mark": (
        TEXT.encode("utf-16-le"),
        "is UTF-16 without a byte order mark, or no text: save",
    ),
    "UTF-16, cut": (b"\xff\xfe" + TEXT.encode("utf-16-le")[:-1], "is UTF-16 and damaged at byte 74: save"),
    "UTF-32": (TEXT.encode("utf-32"), "is UTF-32: save"),
}


@pytest.mark.parametrize("name", ENCODED)
def test_settings_are_read_from_any_editor(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(ENCODED[name])
    assert toml.read(path)["data"]["classes"] == ["müll", "glas"]
    assert user_text.read(path) == TEXT.replace("\r\n", "\n")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_text_says_where_and_what_to_do(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"recipe\.toml: ") as caught:
        toml.read(path)
    assert message in str(caught.value) and "expected settings in TOML" in str(caught.value)
    with pytest.raises(EncodingError):
        user_text.decode(content)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_split_file_of_a_spreadsheet_is_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_bytes("sample,client,set\r\n0,c0,train\r\n1,c0,test\r\n".encode(encoding))
    assert list(split_file.read(path, "toy", 2)) == ["c0"]
    path.write_bytes("sample,client,set\r\n0,cü,train\r\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"not a CSV file .line 2, column 4 is not UTF-8: save"):
        split_file.read(path, "toy", 2)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\n"])
def test_an_empty_file_is_empty_text(content: bytes) -> None:
    assert user_text.decode(content).strip() == ""
