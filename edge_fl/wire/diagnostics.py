"""What a device answers to a query (`edge_fl.wire.messages.Query`): lines of its log, or a diagnostics bundle, as one JSON object.

Both are closed lists of fields. A device with a certificate signs the answer together with its fleet, its name and the id of the query,
so that neither the broker nor another device can forge it, nor replay the answer to another query.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from edge_fl.fields import Text
from edge_fl.wire.messages import Capability, LogLevel

MAX_LINES = 4096
Word = Annotated[str, Meta(max_length=200)]
Setting = bool | int | float | Word


class LogLine(Struct, frozen=True):
    """One line of a device's log; `at` is UTC by the device's clock."""

    at: Annotated[str, Meta(max_length=40)]
    level: LogLevel
    text: Text


class Logs(Struct, frozen=True):
    """Lines of the log, the oldest first; `left_out` older ones that were requested did not fit."""

    lines: Annotated[list[LogLine], Meta(max_length=MAX_LINES)]
    left_out: int = 0


class Check(Struct, frozen=True):
    """One result of the device's doctor."""

    check: Word
    state: Literal["ok", "warning", "failed", "skipped"]
    found: Text
    remedy: Text = ""


class Diagnostics(Struct, frozen=True):
    """A diagnostics bundle. `settings` and `blocked` (releases that failed here) by name, `errors`: the newest warnings and errors."""

    at: Annotated[str, Meta(max_length=40)]
    status: Word
    activity: Word
    release: int
    why: Text
    capability: Capability
    versions: dict[Word, Word]
    settings: dict[Word, Setting]
    checks: list[Check]
    errors: list[LogLine]
    blocked: dict[Word, Text] = {}
    uptime_s: float = 0.0
    running_s: float = 0.0


ANSWERS: dict[str, type[Logs] | type[Diagnostics]] = {"logs": Logs, "diagnostics": Diagnostics}
"""Type of the answer by `Query.what`."""


def signed_content(fleet: str, device: str, id: str, sha256: str) -> dict[str, str]:
    """What a device signs of an answer."""
    return {"fleet": fleet, "device": device, "query": id, "sha256": sha256}
