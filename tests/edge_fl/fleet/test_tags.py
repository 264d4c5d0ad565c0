"""Tags of devices: which can be given, and the file that enrolment writes."""

from pathlib import Path

import pytest

from edge_fl.errors import ConfigError
from edge_fl.fleet import tags


@pytest.mark.parametrize(
    "text", ["site", "Site=x", "site=", "site=two words", "=x", "and=x", "tier=full", "memory_mb=3", "-"]
)
def test_a_tag_that_no_selector_can_name_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        tags.parse(text)


def test_a_tag_is_set_or_removed() -> None:
    assert tags.parse("site=berlin") == ("site", "berlin")
    assert tags.parse("site-") == ("site", "")
    assert tags.parse("line-2=a.b:/+-_") == ("line-2", "a.b:/+-_")


def test_a_broken_file_of_tags_is_named(tmp_path: Path) -> None:
    assert tags.read(tmp_path / "tags.json") == {}
    (tmp_path / "tags.json").write_text('{"pi-01": ["site"]}')
    with pytest.raises(ConfigError, match=r"tags.json: Expected `object`.*; the tags read before stay"):
        tags.read(tmp_path / "tags.json")
