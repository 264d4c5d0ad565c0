"""Connect the publisher of predictions to the broker of the device's settings; the agent has a connection of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edge_fl import toml
from edge_fl.errors import ConfigError, InputError
from edge_fl.files.paths import text
from edge_fl.wire import identity
from edge_fl_devices.config import DeviceBroker, from_options
from edge_fl_devices.runtime.connector import connector
from edge_fl_devices.storage.store import Store
from edge_fl_maker.home_assistant import HomeAssistant


def home_assistant(config: Path | None, name: str | None, connection: Mapping[str, object]) -> HomeAssistant:
    """Connect to the broker of the settings file, of which `connection` replaces parts.

    The device has the name on its certificate, or that of the settings or `name`. Raises ConfigError without a name, InputError if
    a running agent uses the same certificate, ConnectError without a broker.
    """
    own = from_options(config, {}) if config else None
    tree = {**(msgspec.to_builtins(own.broker) if own else {}), **connection}
    broker = toml.checked(tree, DeviceBroker, "device watch")
    endpoint = broker.endpoint
    if certificate := identity.certificate_in(broker.identity):
        name = certificate.device
        if own and name == own.id:
            _require_no_agent(Path(own.folder), broker.identity)
    elif own and not name:
        name = own.id
    if not name:
        raise ConfigError(
            "device watch --publish: expected the device's settings (--config) or its name (--id)"
        )
    client = name if endpoint.cert else f"{name}-watch"
    return HomeAssistant(connector(endpoint, broker.fleet), client, name, broker.fleet)


def _require_no_agent(folder: Path, used: str) -> None:
    """Raise InputError if an agent runs: a broker disconnects the first of two clients with the same certificate."""
    try:
        with Store(folder).owned():
            pass
    except InputError as error:
        raise InputError(
            f"{used}: the agent in {text(folder)} uses this certificate; expected another one (edge-fl fleet enrol NAME-camera, --identity)"
        ) from error
