"""Every error that edge-fl raises on purpose, with the exit code that a command ends with when nobody handles it.

    EdgeFLError                     1  the run failed
    ├── RunError                    1  a run cannot go on (NaN loss, quorum missed for good)
    │   ├── PrivacyError            1  an update would tell more of a client's data than it may
    │   │   └── SpentError          1  that holds of every client: a run ends with what it has reached
    │   └── StoppedError            1  somebody asked it to end
    ├── ArtefactError               1  bytes that are not what their manifest says
    │   └── TrustError              1  release metadata that must not be believed
    ├── ProtocolError               1  a message, topic or tensor file that breaks the wire contract
    ├── ConnectError                2  no broker, refused, not allowed
    ├── DeadlineError               3  something did not happen in time
    └── InputError                  4  what a person gave is wrong
        ├── ConfigError             4  a recipe or an option
        ├── DataError               4  images, labels, folders, splits
        └── MethodError             4  a method, its hyper-parameters, or a model that does not carry it

A message says where, what came, what was expected, and what happens now:
``ArtefactError("extractor.onnx: sha256 3f..., manifest says 9a...; keeping release 12")``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

MAX_REASON = 200  # characters
MAX_KNOWN = 32  # names


class EdgeFLError(Exception):
    """Root of the tree.

    `exit_code` is the exit code of a command that does not handle the error. `consequence` says what happens now; it ends the message.
    Each class has a default, and a raise may give its own.
    """

    exit_code: ClassVar[int] = 1
    consequence: str = ""

    def __init__(self, message: str = "", consequence: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if consequence is not None:
            self.consequence = consequence

    def __str__(self) -> str:
        return f"{self.message}; {self.consequence}" if self.consequence else self.message


class RunError(EdgeFLError):
    """A run cannot go on."""


class PrivacyError(RunError):
    """An update would tell more of a client's data than its budget allows."""


class BudgetExhaustedError(PrivacyError):
    """The privacy budget of every client is spent, so no further round is possible."""


class StoppedError(RunError):
    """A run ends because somebody asked for it."""


class ArtefactError(EdgeFLError):
    """Bytes that are not what their manifest says, or that this device cannot run; `why` is the one word a device reports."""

    consequence = "not used"

    def __init__(self, message: str, why: str = "", consequence: str | None = None) -> None:
        super().__init__(message, consequence)
        self.why = why


class TrustError(ArtefactError):
    """Release metadata that must not be believed: rollback, freeze, wrong key, expired."""


class ProtocolError(EdgeFLError):
    """A message, topic or tensor file that breaks the wire contract."""

    consequence = "ignored"


class ConnectError(EdgeFLError):
    """No broker there, or it does not let us in."""

    exit_code: ClassVar[int] = 2


class DeadlineError(EdgeFLError):
    """Something did not happen in time."""

    exit_code: ClassVar[int] = 3


class InputError(EdgeFLError):
    """Invalid input from a person."""

    exit_code: ClassVar[int] = 4
    consequence = "nothing was changed"


class ConfigError(InputError):
    """A recipe or an option that cannot be used."""


class DataError(InputError):
    """Images, labels, folders or splits that cannot be used."""


class MethodError(InputError):
    """A method, one of its hyper-parameters, or a model that does not carry it."""


def brief(reason: object) -> str:
    """What another library says is wrong, cut short: it may quote what came, however long that is."""
    return str(reason)[:MAX_REASON]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: `` (did you mean 'fedavg'?)``, or the known names when none is near; empty where none is known."""
    names = sorted(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f" (did you mean {near[0]!r}?)"
    more = f" and {len(names) - MAX_KNOWN} more" if len(names) > MAX_KNOWN else ""
    return f" (known: {', '.join(names[:MAX_KNOWN])}{more})" if names else ""
