"""Settings of devices that the operator may change from afar, the messages about them, and their checks; docs/remote-settings.md.

Left out, and so the owner's alone, is what decides over data that leave the device, over its software and over its place on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from edge_fl.fields import Number, ServerSignature, Text
from edge_fl.files.paths import composed
from edge_fl.toml import checked

MAX_SETTINGS = 64
Key = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}(\.[a-z_]{1,32})?\Z")]
Value = bool | int | float | Text | Annotated[list[Text], Meta(max_length=1024)]
Values = Annotated[dict[Key, Value], Meta(max_length=MAX_SETTINGS)]
Origin = Literal["default", "file", "local", "remote", "fallback"]
Amount = Annotated[float, Meta(ge=0)]


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits per day; 0: no limit. `watts` is the power of one busy core: energy is estimated as processor seconds times watts."""

    megabytes: Amount = 0.0
    cpu_s: Amount = 0.0
    kilojoules: Amount = 0.0
    watts: Amount = 2.5


class BrokerAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """Address of the broker; port 0: 8883 with an identity, else 1883."""

    host: Annotated[str, Meta(pattern=r"^[^\s/@]+\Z")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class SharedSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that owner and operator may change; `edge_fl_devices.config.DeviceConfig` explains them."""

    head: Text = "logistic"
    head_budget_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    balanced: bool = False
    classes: (
        Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(max_length=1024)] | Literal["own"]
    ) = []
    keep: Annotated[int, Meta(ge=0)] = 0
    policy: Literal["newest", "reservoir"] = "newest"
    watch_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    refit_every_s: Annotated[float, Meta(ge=0, le=86_400 * 30)] = 300.0
    promise: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    false_alarm: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        if self.classes != "own":
            msgspec.structs.force_setattr(self, "classes", [composed(name) for name in self.classes])


class DeviceSettings(SharedSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings that the operator may change: the data only to another folder, since other sources can run code."""

    data: Annotated[str, Meta(pattern=r"^folder:/[^\x00-\x1f]*\Z")] = ""
    broker: BrokerAddress = BrokerAddress()


class DesiredSettings(Struct, frozen=True):
    """dn/settings, retained: the operator's settings of one device, by key ("watch_s", "budget.megabytes").

    Each change has a higher `serial`; a key that is left out is the device's own again.
    """

    serial: Number
    values: Values
    signature: ServerSignature | None = None


class ActualSetting(Struct, frozen=True):
    """A setting as it is in effect on a device. `value` is None where it is the owner's and private.

    `origin`: "default"; "file", in the settings with which the device was installed; "local", changed on the device since; "remote"; or
    "fallback", the last address of a broker that worked. `why`: why the operator's value is not in effect.
    """

    origin: Origin
    value: Value | None = None
    why: Text = ""


class SettingsStatus(Struct, frozen=True):
    """Part of a capability: the last accepted `serial`, and the settings that are not at their defaults.

    `why`: why a message with settings was rejected, or "local_only" where the owner has switched `remote_settings` off.
    """

    serial: Number = 0
    settings: Annotated[dict[Key, ActualSetting], Meta(max_length=MAX_SETTINGS)] = {}
    why: Text = ""


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a settings file by key, with tables as "table.key"."""
    return {
        f"{name}.{key}" if key else name: content
        for name, value in tree.items()
        for key, content in (value.items() if isinstance(value, Mapping) else [("", value)])
    }


def nested(values: Mapping[str, Any], tree: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Inverse of `flat`: the settings file `tree` with these values."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for key, value in values.items():
        table, dot, name = key.partition(".")
        if dot:
            result.setdefault(table, {})[name] = value
        else:
            result[key] = value
    return result


DEFAULTS: Mapping[str, Any] = flat(msgspec.to_builtins(DeviceSettings()))
"""Key -> default, of all settings that the operator may change."""


def require(values: Mapping[str, Any], where: str) -> None:
    """Check names, types and ranges. Raises ConfigError, with the nearest known key for a mistyped one."""
    checked(nested(values), DeviceSettings, where)
