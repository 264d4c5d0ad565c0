"""Full check of a broker with TLS, with two temporary devices that are certified for ten minutes."""

from __future__ import annotations

import secrets
import tempfile
from datetime import timedelta
from pathlib import Path

from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl_broker.access import check_access
from edge_fl_broker.check import CheckResult, Party, check
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import FOLDERS, Authority

LIFE = timedelta(minutes=10)


def full_check(home: Path, endpoint: Endpoint, fleet: str, deadline_s: float) -> list[CheckResult]:
    """Run `check` and `check_access`. Raises ConfigError without a CA, ConnectError when a client cannot connect."""
    register_sync.require(home)
    authority = Authority.open(home)
    operator = identity.read(home / FOLDERS["operator"])
    with tempfile.TemporaryDirectory() as folder:
        names = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
        devices = authority.bake({name: Path(folder, name) for name in names}, LIFE)
        operator_party, device, other = (
            Party(client.name, client.endpoint(endpoint.host, endpoint.port))
            for client in (operator, *devices)
        )
        return [
            *check(operator_party, device, fleet, deadline_s),
            *check_access(operator_party, device, other, fleet, deadline_s),
        ]
