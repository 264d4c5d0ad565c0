"""What people did with the fleet's certificates, in a file next to the server's identity: its server enters it into the audit log.

The commands on certificates need no registry, and the machine of the certificate authority may have none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.files.accounts import local_user
from edge_fl.files.paths import text
from edge_fl.untrusted import NOT_JSON

log = logging.getLogger(__name__)

ACTIONS_FILE = "actions.jsonl"
ACTING_FOR = "EDGE_FL_ACTING_FOR"
"""Environment variable: the person for whom another program runs a command."""


class CertificateAction(Struct, frozen=True):
    """One action: ISO time (UTC, to the millisecond), who, an action of `edge_fl.wire.roles`, and on what."""

    at: str
    who: str
    action: str
    target: str


def note(folder: Path, action: str, targets: Iterable[str]) -> None:
    """Add the action on each target. Raises OSError."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    who = os.environ.get(ACTING_FOR) or local_user()
    lines = [msgspec.json.encode(CertificateAction(at, who, action, target)) + b"\n" for target in targets]
    with (folder / ACTIONS_FILE).open("ab") as file:
        file.write(b"".join(lines))


def read(path: Path) -> list[CertificateAction]:
    """All actions; lines that cannot be read are skipped. Empty without the file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(line, type=CertificateAction))
        except NOT_JSON:
            log.warning("%s: line %d is not an action; skipped", text(path), number)
    return found
