"""Every error that edge-fl raises on purpose, and the exit code of a command that does not handle it.

    EdgeFLError                       1  base class
    ├── RunError                      1  a run cannot continue: NaN loss, quorum missed on the last attempt
    │   ├── PrivacyError              1  an update would exceed a client's privacy budget
    │   │   └── BudgetExhaustedError  1  no client has privacy budget left; the run ends with what it has reached
    │   └── StoppedError              1  a run was stopped on request
    ├── ArtefactError                 1  bytes that do not match their manifest, or that this device cannot run
    │   └── TrustError                1  release metadata that fails verification
    ├── ProtocolError                 1  a message, topic or tensor file that violates the protocol
    ├── SecureSumError                1  a secure sum that was not completed
    ├── StatisticsError               1  class statistics that no pictures can have
    ├── ChildError                    1  a child process that ended without a result, or failed unexpectedly
    │   └── KilledError               1  a child process that a signal ended
    ├── ConnectError                  2  no broker, or access denied
    ├── DeadlineError                 3  a deadline passed
    ├── GateError                     3  a gate aborted or paused the roll-out of a release
    └── InputError                    4  invalid input from a person
        ├── ConfigError               4  a recipe or an option
        ├── DataError                 4  images, labels, folders, splits
        │   └── NoLabelsError         4  nothing is labelled yet: not a fault
        └── MethodError               4  a method, its hyper-parameters, or a model that does not support it

A message says where, what was found and what was expected. `consequence` completes it with what happens now:
``ArtefactError("extractor.onnx: sha256 3f..., manifest says 9a...", consequence="keeping release 12")`` reads
"extractor.onnx: sha256 3f..., manifest says 9a...; keeping release 12".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar

from edge_fl.failures import Failure

NOTHING_RUN, STOPPED = "nothing was run", "the run stopped"
"""Consequences of an error in a user's own code."""
MAX_REASON = 200  # characters
MAX_KNOWN = 32  # names


class EdgeFLError(Exception):
    """Base class of all errors raised on purpose.

    `exit_code` is the exit code of a command that does not handle the error. `message` is the text without `consequence`. Each class has a
    default consequence; `consequence` overrides it for one error.
    """

    exit_code: ClassVar[int] = 1
    consequence: str = ""

    def __init__(self, message: str = "", consequence: str | None = None) -> None:
        message = encodable(message)  # it may be sent or stored, wherever its text comes from
        super().__init__(message)
        self.message = message
        if consequence is not None:
            self.consequence = consequence

    def __str__(self) -> str:
        return f"{self.message}; {self.consequence}" if self.consequence else self.message


class RunError(EdgeFLError):
    """A run cannot continue."""


class PrivacyError(RunError):
    """An update would exceed a client's privacy budget."""


class BudgetExhaustedError(PrivacyError):
    """The privacy budget of every client is exhausted, so no further round is possible."""


class StoppedError(RunError):
    """A run was stopped on request."""


class ArtefactError(EdgeFLError):
    """Bytes that do not match their manifest, or that this device cannot run; `why` is the failure word that a device reports."""

    consequence = "not used"

    def __init__(self, message: str, why: Failure | None = None, consequence: str | None = None) -> None:
        super().__init__(message, consequence)
        self.why = why


class TrustError(ArtefactError):
    """Release metadata that fails verification: rollback, freeze, wrong key, expired."""


class ProtocolError(EdgeFLError):
    """A message, topic or tensor file that violates the protocol."""

    consequence = "ignored"


class SecureSumError(EdgeFLError):
    """A secure sum that was not completed; `why` is the failure word that a device sends."""

    consequence = "no statistic was revealed"

    def __init__(self, message: str, why: Failure | None = None, consequence: str | None = None) -> None:
        super().__init__(message, consequence)
        self.why = why


class StatisticsError(EdgeFLError):
    """Class statistics that no pictures can have, or that do not fit their message."""

    consequence = "they were not used"


class ChildError(EdgeFLError):
    """A child process that ended without a result, or failed unexpectedly. That says nothing about its input: it is tried again."""


class KilledError(ChildError):
    """A child process that a signal ended; `signal` is its name, such as SIGSEGV. SIGKILL is a MemoryError instead."""

    def __init__(self, message: str, signal: str, consequence: str | None = None) -> None:
        super().__init__(message, consequence)
        self.signal = signal


class ConnectError(EdgeFLError):
    """No broker, or access denied."""

    exit_code: ClassVar[int] = 2


class DeadlineError(EdgeFLError):
    """A deadline passed."""

    exit_code: ClassVar[int] = 3


class GateError(EdgeFLError):
    """A gate aborted or paused the roll-out of a release."""

    exit_code: ClassVar[int] = 3


class InputError(EdgeFLError):
    """Invalid input from a person."""

    exit_code: ClassVar[int] = 4
    consequence = "nothing was changed"


class ConfigError(InputError):
    """An invalid recipe, setting or option."""


class DataError(InputError):
    """Invalid images, labels, folders or splits."""


class NoLabelsError(DataError):
    """Too few labelled images, because none have been labelled yet: not a fault."""


class MethodError(InputError):
    """An invalid method or hyper-parameter, or a model that does not support the method."""


def encodable(text: str) -> str:
    r"""Return a text with \xNN instead of bytes that are not UTF-8: for what was formatted without `edge_fl.files.paths.text`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            found = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # surrogates that are no bytes of a path
            found = text.encode("utf-8", "surrogatepass")
        return found.decode("utf-8", "backslashreplace")
    return text


def brief(reason: object) -> str:
    """Shorten another library's error text: it may quote input of any length."""
    return str(reason)[:MAX_REASON]


def nearest(name: str, known: Iterable[str]) -> str:
    """Format a hint for a mistyped name: `` (did you mean 'fedavg'?)``, else the known names; empty if none are known."""
    names = sorted(known)
    return similar(name, names) or (f" (known: {shortened(names)})" if names else "")


def similar(name: str, known: Iterable[str]) -> str:
    """Format the most similar known name: `` (did you mean 'fedavg'?)``; empty if none is similar."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def shortened(names: Sequence[str], most: int = MAX_KNOWN, separator: str = ", ") -> str:
    """The first `most` of the names in one line, and the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{separator.join(names[:most])}{more}"
