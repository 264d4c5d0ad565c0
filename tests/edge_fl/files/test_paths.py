"""Names of files become text that every output takes, and bytes that are the file's own, whatever they hold."""

import json
import os
import unicodedata
from pathlib import Path

import msgspec
import pytest

from edge_fl.errors import DataError
from edge_fl.files import paths

LATIN1 = os.fsdecode(b"caf\xe9.jpg")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat/müll 1.jpg", "cat/müll 1.jpg"),
        (LATIN1, "caf\\xe9.jpg"),
        ("a\nb\x1b[31m.jpg", "a\\nb\\x1b[31m.jpg"),
        ("right\u202eleft.jpg", "right\\u202eleft.jpg"),
        ("👨\u200d👩\u200d👧.jpg", "👨\u200d👩\u200d👧.jpg"),
        ("no byte \ud800.jpg", "no byte \\xed\\xa0\\x80.jpg"),
        ("", ""),
    ],
)
def test_every_name_becomes_printable_text(name: str, shown: str) -> None:
    assert paths.text(name) == paths.text(
        name.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    )
    assert paths.text(name) == shown
    assert (
        msgspec.json.decode(msgspec.json.encode(paths.text(name))) == json.loads(json.dumps(shown)) == shown
    )


def test_bytes_of_a_name_are_those_on_the_disk(tmp_path: Path) -> None:
    Path(tmp_path, LATIN1).touch()
    (found,) = tmp_path.iterdir()
    assert paths.raw(found.name) == b"caf\xe9.jpg"
    assert not paths.is_utf8(found) and paths.is_utf8("müll")


def test_names_are_compared_in_one_form() -> None:
    apart = unicodedata.normalize("NFD", "müll")
    assert apart != "müll" and paths.composed(apart) == paths.composed("müll") == "müll"


def test_the_text_of_an_error_can_be_sent_whatever_a_library_put_into_it() -> None:
    error = DataError(f"{LATIN1}: damaged")
    assert error.message == str(error).partition(";")[0] == "caf\\xe9.jpg: damaged"
    assert msgspec.json.encode(error.message)
