"""The operator's settings of a device next to those in effect, from what the device reports."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from edge_fl.console.tables import Column, Columns, cell_text
from edge_fl.failures import Failure
from edge_fl.fleet.settings import DEFAULTS, ActualSetting, DesiredSettings, SettingsStatus


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
    "actual": Column("actual", shown),
    "origin": "origin",
    "state": Column("state", prose=True),
}
NO_SETTINGS = DesiredSettings(0, {})
APPLIED, WAITING = "applied", "waiting for the device"
LOCAL = "changed on the device"
REFUSED = {word: word.explanation for word in (Failure.LOCAL_ONLY, Failure.FIXED)}
"""Failure words of a device against all settings; the others are of the message."""
NO_FAULT = {APPLIED, WAITING, LOCAL, *REFUSED.values()}
"""States for which the operator's value is not to blame."""


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
    status = msgspec.convert(reported, SettingsStatus) if reported else None
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
