"""Tags of devices: a key and a value, given at enrolment or by the operator; docs/tags.md.

`fleet enrol --tag` writes those of each device into TAGS_FILE next to the server's identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edge_fl.errors import ConfigError
from edge_fl.files import paths
from edge_fl.untrusted import NOT_JSON

TAGS_FILE = "tags.json"
TEXTS = tuple("name status standing activity why tier head arch".split())
VERSIONS = ("python", "onnxruntime", "agent")
NUMBERS = ("release", "samples", "memory_mb", "disk_free_mb", "drift")
ATTRIBUTES = (*TEXTS, *VERSIONS, *NUMBERS)
"""What a device reports or the server decides; no tag may have their names."""
RESERVED = frozenset({*ATTRIBUTES, "and", "or", "not"})
KEY = re.compile(r"[a-z][a-z0-9_.-]{0,31}\Z")
VALUE = re.compile(r"[\w.:/+-]{1,64}\Z", re.ASCII)

Tags = Mapping[str, str]
"""Key -> value."""


def parse(text: str) -> tuple[str, str]:
    """Parse ``key=value``; ``key-`` gives an empty value, which removes the tag. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals and text.endswith("-"):
        key = text[:-1]
    elif not (equals and VALUE.match(value)):
        raise ConfigError(
            f"tag {text!r}: expected key=value, or key- to remove it; a value has 1 to 64 of A-Z, a-z, 0-9 and . _ : / + -"
        )
    if not KEY.match(key):
        raise ConfigError(
            f"tag {text!r}: key {key!r}: expected 1 to 32 of a-z, 0-9 and . _ -, the first a letter"
        )
    if key in RESERVED:
        raise ConfigError(f"tag {text!r}: {key!r} has a meaning in selectors already; expected another key")
    return key, value


def read(path: Path) -> dict[str, dict[str, str]]:
    """The tags that devices were enrolled with, by device; none without the file. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except FileNotFoundError:
        return {}
    except (OSError, *NOT_JSON) as error:
        raise ConfigError(
            f"{paths.text(path)}: {error}; expected the tags of enrolled devices", "the tags read before stay"
        ) from error
