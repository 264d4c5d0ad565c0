"""A full check of a broker that is closed: two devices are certified for it, for ten minutes, and their keys go when it ends."""

from __future__ import annotations

import secrets
import tempfile
from datetime import timedelta
from pathlib import Path

from broker.access import check_access
from broker.check import Finding, Party, check
from broker.provision import register_sync
from broker.provision.authority import FOLDERS, Authority
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint

LIFE = timedelta(minutes=10)


def full_check(home: Path, endpoint: Endpoint, fleet: str, deadline_s: float) -> list[Finding]:
    """Everything that `check` and `check_access` try. Raises ConfigError without a CA, ConnectError when somebody does not get in."""
    register_sync.require(home)
    authority = Authority.open(home)
    operator = identity.read(home / FOLDERS["operator"])
    with tempfile.TemporaryDirectory() as folder:
        names = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
        made = authority.bake({name: Path(folder, name) for name in names}, LIFE)
        above, device, other = (
            Party(found.name, found.endpoint(endpoint.host, endpoint.port)) for found in (operator, *made)
        )
        return [
            *check(above, device, fleet, deadline_s),
            *check_access(above, device, other, fleet, deadline_s),
        ]
