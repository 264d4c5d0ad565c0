"""Publish predictions over MQTT, with Home Assistant's MQTT discovery (home-assistant.io/integrations/mqtt, sensor.mqtt, update.mqtt).

    homeassistant/sensor/DEVICE/class/config         retained: describes the sensor of the class
    homeassistant/sensor/DEVICE/probability/config   retained: the sensor of its probability
    homeassistant/sensor/DEVICE/prediction           the newest prediction, as JSON
    homeassistant/sensor/DEVICE/availability         retained, and the will: online or offline
    homeassistant/update/DEVICE/release/config       retained: describes the update of the release
    homeassistant/update/DEVICE/release/state        retained: the release that predicts, and the one that the server offered
    homeassistant/update/DEVICE/agent/{config,state} retained: the same of the agent's software

The broker's access list grants a device these two branches (`edge_fl.wire.topics.access_rules`). An update has no command: the server
decides what its devices install.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from edge_fl import __version__, toml
from edge_fl.errors import ConfigError, DeadlineError, InputError
from edge_fl.files.paths import text
from edge_fl.wire import identity
from edge_fl.wire.topics import HomeAssistantComponent, home_assistant
from edge_fl.wire.transport import Connect, Connected, Event, Packet
from edge_fl_devices.config import DeviceBroker, from_options
from edge_fl_devices.runtime.connection import connector
from edge_fl_devices.storage.store import Store
from edge_fl_maker.known_versions import Versions, of_agent, of_release
from edge_fl_maker.watch import WatchedPrediction

ONLINE, OFFLINE = b"online", b"offline"
TEXT = "text/plain"
CONNECT_S = 15.0
DRAIN_S = 2.0
REPEAT_S = 10.0
"""An unchanged class is published at most this often."""


class HomeAssistant:
    """Announces the device's sensors and publishes its predictions and versions. `client` is the MQTT client's name, `folder` the device's.

    Raises ConnectError if no broker accepts the client at first. Later connections are made in the background; predictions expire
    after REPEAT_S.
    """

    def __init__(self, connect: Connect, client: str, device: str, fleet: str, folder: Path) -> None:
        self._device, self._fleet, self._folder = device, fleet, folder
        self._announce = threading.Event()
        self._published, self._due_s = "", 0.0
        self._versions, self._versions_due_s = dict[str, Versions](), 0.0
        will = Packet(home_assistant(device, "availability"), OFFLINE, retain=True, content_type=TEXT)
        self._transport = connect(client, will, self._receive)
        try:
            self._transport.wait_connected(CONNECT_S)
        except BaseException:
            self._transport.close()
            raise
        self._announce.wait(
            CONNECT_S
        )  # `Connected` may come a moment later, and must not be taken for a reconnect

    def publish(self, found: WatchedPrediction) -> None:
        """Publish a prediction if its state is new or the last one is older than REPEAT_S."""
        if self._announce.is_set():  # connected, for the first time or again
            self._announce.clear()
            for packet in (*announcements(self._device, self._fleet), self._availability(ONLINE)):
                self._transport.publish(packet)
            self._published, self._versions, self._versions_due_s = "", {}, 0.0
        now_s = time.monotonic()
        if now_s >= self._versions_due_s:
            self._versions_due_s = now_s + REPEAT_S
            self._publish_versions(found.release)
        shown = found.state or ""
        if shown == self._published and now_s < self._due_s:
            return
        self._published, self._due_s = shown, now_s + REPEAT_S
        topic = home_assistant(self._device, "prediction")
        self._transport.publish(Packet(topic, msgspec.json.encode(found), expiry_s=int(REPEAT_S)))

    def close(self) -> None:
        """Publish that the device is offline, and disconnect."""
        self._transport.publish(self._availability(OFFLINE))
        with suppress(DeadlineError):
            self._transport.drain(DRAIN_S)
        self._transport.close()

    def _publish_versions(self, predicting: int) -> None:
        """Publish the versions of release and agent that are new."""
        versions = {"release": of_release(self._folder, predicting), "agent": of_agent(self._folder)}
        for what, found in versions.items():
            if found != self._versions.get(what):
                topic = home_assistant(self._device, f"{what}/state", "update")
                self._transport.publish(Packet(topic, msgspec.json.encode(found), retain=True))
        self._versions = versions

    def _receive(self, event: Event) -> None:
        if isinstance(event, Connected):
            self._announce.set()

    def _availability(self, payload: bytes) -> Packet:
        return Packet(home_assistant(self._device, "availability"), payload, retain=True, content_type=TEXT)


def announcements(device: str, fleet: str) -> list[Packet]:
    """The retained discovery messages of a device: one per sensor and update, all of one Home Assistant device."""
    state = home_assistant(device, "prediction")
    common = {
        "availability_topic": home_assistant(device, "availability"),
        "device": {"identifiers": [f"edge-fl-{fleet}-{device}"], "name": device, "manufacturer": "edge-fl"},
        "origin": {"name": "edge-fl", "sw_version": __version__},
    }
    sensors: dict[str, dict[str, object]] = {
        "class": {
            "name": "Class",
            "state_topic": state,
            "icon": "mdi:eye",
            "value_template": "{{ value_json.state }}",
            "json_attributes_topic": state,
        },
        "probability": {
            "name": "Probability",
            "state_topic": state,
            "unit_of_measurement": "%",
            "state_class": "measurement",
            "value_template": "{{ (100 * value_json.probability) | round(1) }}",
        },
    }
    updates: dict[str, dict[str, object]] = {
        what: {
            "name": what.capitalize(),
            "state_topic": home_assistant(device, f"{what}/state", "update"),
            "entity_category": "diagnostic",
        }
        for what in ("release", "agent")
    }
    components: dict[HomeAssistantComponent, dict[str, dict[str, object]]] = {
        "sensor": sensors,
        "update": updates,
    }
    return [
        Packet(
            home_assistant(device, f"{name}/config", component),
            msgspec.json.encode({**own, **common, "unique_id": f"edge-fl-{fleet}-{device}-{name}"}),
            retain=True,
        )
        for component, entities in components.items()
        for name, own in entities.items()
    ]


def connected(
    config: Path | None, name: str | None, connection: Mapping[str, object], folder: Path
) -> HomeAssistant:
    """Connect to the broker of the settings file, of which `connection` replaces parts; `folder` is the device's.

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
    return HomeAssistant(connector(endpoint, broker.fleet), client, name, broker.fleet, folder)


def _require_no_agent(folder: Path, used: str) -> None:
    """Raise InputError if an agent runs: a broker disconnects the first of two clients with the same certificate."""
    try:
        with Store(folder).owned():
            pass
    except InputError as error:
        raise InputError(
            f"{used}: the agent in {text(folder)} uses this certificate; expected another one (edge-fl fleet enrol NAME-camera, --identity)"
        ) from error
