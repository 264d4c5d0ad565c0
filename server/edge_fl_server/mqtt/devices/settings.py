"""The operator's settings on their way to the devices: one retained message each, signed for its device.

They are read from the registry as they change, and published again when the connection returns. Without a director, which signs, none are
published: devices accept no others.
"""

import threading

from edge_fl.fleet.settings import DesiredSettings
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.registry import devices


class SettingsPublisher:
    """Publishes the settings of one fleet; `advance` is called again and again by the thread of the journal."""

    def __init__(self, connection: ServerConnection, journal: Journal) -> None:
        self._connection, self._journal, self._director = connection, journal, connection.director
        self._published: dict[str, DesiredSettings] = {}
        self._serial = 0
        self._connected = False
        self._lock = threading.Lock()
        if self._director:
            connection.on_connected(lambda lost: self._publish_all())
            journal.on_written.append(self.advance)

    def advance(self) -> None:
        """Publish what has changed in the registry. Raises EdgeFLError; the next call tries again."""
        if self._director is None or not self._connected:
            return
        with self._lock:
            changed = devices.desired_settings(self._journal.db, self._journal.fleet, self._serial)
            for device, settings in changed.items():
                self._publish(device, settings)
            self._serial = max([self._serial, *(settings.serial for settings in changed.values())])

    def refresh(self) -> None:
        """Sign and publish again what a replaced key signed."""
        with self._lock:
            for device, settings in self._published.items():
                if self._director and self._director.is_stale(settings):
                    self._publish(device, settings)

    def _publish_all(self) -> None:
        with self._lock:
            self._serial, self._connected = 0, True
        self.advance()

    def _publish(self, device: str, settings: DesiredSettings) -> None:
        if self._director is None or self._journal.blocked(device) == "removed":
            return
        known = self._published.get(device)
        if known is None or known.serial != settings.serial or self._director.is_stale(known):
            known = self._director.sign("settings", device, settings)
        self._published[device] = known
        self._connection.publish(self._connection.topics.down(device, "settings"), known, retain=True)
