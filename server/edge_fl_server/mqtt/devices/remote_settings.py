"""The operator's settings of devices: published to each, signed for it, and compared with those in effect, which it reports.

They are read from the registry as they change, and published again when the connection returns. Without a director, which signs, none are
published: devices accept no others.
"""

import threading
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from edge_fl.console.tables import Column, Columns, cell_text
from edge_fl.console.units import cut_prose
from edge_fl.failures import Failure
from edge_fl.fleet.remote_settings import DEFAULTS, ActualSetting, DesiredSettings, SettingsStatus
from edge_fl.untrusted import converted
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.registry import registered_devices

NO_SETTINGS = DesiredSettings(0, {})
APPLIED, WAITING = "applied", "waiting for the device"
LOCAL = "changed on the device"
REFUSED = {word: word.explanation for word in (Failure.LOCAL_ONLY, Failure.FIXED)}
"""Failure words of a device against all settings; the others are of the message."""
NO_FAULT = {APPLIED, WAITING, LOCAL, *REFUSED.values()}
"""States for which the operator's value is not to blame."""


def shown(value: Any) -> str:
    """A value as it is written in `edge-fl fleet set`, "-" for None."""
    if isinstance(value, list):
        return ",".join(value) or "[]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else cell_text(value)


COLUMNS: Columns = {
    "device": "device",
    "setting": "setting",
    "desired": Column("desired", shown),
    "actual": Column("actual", lambda value: cut_prose(shown(value))),
    "origin": "origin",
    "state": Column("state", cut_prose, prose=True),
}


class SettingRow(Struct, frozen=True):
    """One setting; `desired` and `actual` are None where they are not set or not known, `state` is "" without a desired value."""

    setting: str
    desired: Any = None
    actual: Any = None
    origin: str = ""
    state: str = ""


def rows(desired: DesiredSettings, capability: Mapping[str, Any] | None) -> list[SettingRow]:
    """The settings that are desired for a device, or that it reports other than at their defaults, by name."""
    reported = (capability or {}).get("settings")
    status = converted(reported, SettingsStatus) if reported else None
    known = status.settings if status else {}
    return [
        _row(key, desired, known.get(key), status) for key in sorted(desired.values.keys() | known.keys())
    ]


def differing(desired: DesiredSettings, capability: Mapping[str, Any] | None) -> list[SettingRow]:
    """The desired settings that are not in effect."""
    return [row for row in rows(desired, capability) if row.state not in ("", APPLIED)]


def _row(
    key: str,
    desired: DesiredSettings,
    actual: ActualSetting | None,
    status: SettingsStatus | None,
) -> SettingRow:
    value = desired.values.get(key)
    origin, found = "", None
    if status:
        actual = actual or ActualSetting("default", DEFAULTS.get(key))
        origin, found = actual.origin, actual.value
    if value is None:
        state = WAITING if origin == "remote" else ""
    elif status is None or actual is None:
        state = WAITING
    elif origin == "remote" and found == value:
        state = APPLIED
    elif status.why:
        word = Failure.of(status.why)
        state = (word and REFUSED.get(word)) or f"rejected by the device: {status.why}"
    elif status.serial < desired.serial:
        state = WAITING
    else:
        state = actual.why or "not in effect"
    return SettingRow(key, value, found, origin, state)


class SettingsPublisher:
    """Publishes the settings of one fleet; `advance` is called again and again by the thread of the journal."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection, self._journal = connection, connection.journal
        self._director = connection.director
        self._published: dict[str, DesiredSettings] = {}
        self._serial = 0
        self._connected = False
        self._lock = threading.Lock()
        if self._director:
            connection.on_connected(lambda lost: self._publish_all())
            self._journal.on_written.append(self.advance)

    def advance(self) -> None:
        """Publish what has changed in the registry. Raises EdgeFLError; the next call tries again."""
        if self._director is None or not self._connected:
            return
        with self._lock:
            changed = registered_devices.desired_settings(self._journal.db, self._journal.fleet, self._serial)
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
