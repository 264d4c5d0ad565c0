"""Settings from the operator: what they change on this device, and which address of the broker is used.

A value counts over the default and over the settings file as the device was installed, but not over a later change of that file. Values
are tried: those that the agent cannot start with are rejected, and the ones before stay. A new address of the broker is adopted once a
connection to it has been made; one that cannot be reached is left for the last one that worked.

    FOLDER/remote.json    the accepted settings, those of the installation, and the addresses that worked
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.failures import Failure
from edge_fl.files.paths import text
from edge_fl.fleet import remote_settings
from edge_fl.fleet.remote_settings import (
    DEFAULTS,
    ActualSetting,
    BrokerAddress,
    DesiredSettings,
    Origin,
    SettingsStatus,
    flat,
    nested,
)
from edge_fl.wire.egress import SETTINGS
from edge_fl_devices import config as own_settings
from edge_fl_devices.agent.events import Received
from edge_fl_devices.config import FOLDER, DeviceConfig
from edge_fl_devices.storage import read_json, write_json

log = logging.getLogger(__name__)

FILE = "remote.json"
TRIAL_S = 45.0  # until an address that never worked is left
RETURN_S = 600.0  # until one that worked is left
ADDRESSES = 2  # that worked, kept
LOCAL = "changed on the device"


class Kept(Struct, frozen=True):
    """What is on the disk: `installed`, the settings file when the device first connected; `values` of `serial`, the last accepted ones,
    and why some `failed`; `good`, the operator's values that the agent has started with; the addresses that `worked`, the newest first;
    `unreached`.
    """

    installed: dict[str, Any] | None = None
    serial: int = 0
    values: dict[str, Any] = {}
    failed: dict[str, str] = {}
    good: dict[str, Any] = {}
    worked: list[BrokerAddress] = []
    unreached: BrokerAddress | None = None


def merged(local: Mapping[str, Any], kept: Kept, where: str) -> tuple[DeviceConfig, SettingsStatus]:
    """The settings in effect, and what became of the operator's. Raises ConfigError if those of the file are invalid.

    Where a value of the operator is of no use, the one before, with which the agent has started, stays.
    """
    own = {key: value for key, value in flat(local).items() if key in DEFAULTS}
    installed = own if kept.installed is None else kept.installed
    edited = {key for key, value in own.items() if key not in installed or installed[key] != value}
    tree, why, remote = dict(local), dict(kept.failed), set[str]()
    config = own_settings.convert(tree, where)
    enabled = config.remote_settings
    for key, value in kept.values.items() if enabled else ():
        if key in edited:
            why[key] = LOCAL
            continue
        before = [kept.good[key]] if key in kept.good else []
        for usable in before if key in why else [value, *before]:
            try:
                remote_settings.require({key: usable}, "remote settings")
                changed = nested({key: usable}, tree)
                config = own_settings.convert(changed, "remote settings")
            except ConfigError as error:
                why.setdefault(key, error.message[:400])
            else:
                tree = changed
                remote.add(key)
                break
    values = flat(msgspec.to_builtins(config))
    actual = {}
    for key in sorted(DEFAULTS.keys() | kept.values.keys()):
        if key in remote:
            actual[key] = ActualSetting("remote", values[key], why.get(key, ""))
        elif key in own or why.get(key):
            origin: Origin = "local" if key in edited else "file" if key in own else "default"
            public = values.get(key) if key in SETTINGS else None
            actual[key] = ActualSetting(origin, public, why.get(key, "") if enabled else "")
    return config, SettingsStatus(kept.serial, actual, "" if enabled else Failure.LOCAL_ONLY)


def _unusable(values: Mapping[str, Any]) -> dict[str, str]:
    """Why values are of no use on this device at present, by key."""
    folder = Path(str(values.get("data", "folder:/")).removeprefix("folder:"))
    usable = folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
    return {} if usable else {"data": f"{text(folder)}: not a folder that the agent can read"}


class RemoteSettings:
    """The settings of one agent. `config` and `status` are those in effect; with `restart_due` the agent should start with other ones.

    local: the tree of the settings file and the options of the command. Raises ConfigError if it is invalid.
    """

    def __init__(self, local: Mapping[str, Any], where: str) -> None:
        self._local, self._where = local, where
        self._file = Path(str(local.get("folder", FOLDER))) / FILE
        self._kept = read_json(self._file, Kept) or Kept()
        self._next: BrokerAddress | None = None
        self.begin()

    def begin(self) -> None:
        """Put the accepted settings into effect; the agent starts with them."""
        self.config, self.status = merged(self._local, self._kept, self._where)
        actual = self.status.settings.items()
        self._effective = {key: each.value for key, each in actual if each.origin == "remote"}
        self._desired = BrokerAddress(self.config.broker.host, self.config.broker.port)
        self._since_s: float | None = None
        self.restart_due = False
        addresses = self._addresses()
        self._current = self._next if self._next in addresses else addresses[0]
        self._next = None
        if self._current != self._desired:
            why = f"{self.config.broker.address} was not reached"
            host, port = self._current.host, self._current.port
            broker = replace(self.config.broker, host=host, port=port)
            self.config = replace(self.config, broker=broker)
            fallback = {
                "broker.host": ActualSetting("fallback", host, why),
                "broker.port": ActualSetting("fallback", port, why),
            }
            self.status = replace(self.status, settings={**self.status.settings, **fallback})

    def receive(self, event: Received) -> SettingsStatus:
        """Take a message with settings; return the status after it."""
        message = event.message
        if not isinstance(message, DesiredSettings):
            return self.status  # cleared: a broker could do so
        if event.retain and not event.rejected and message.serial < self._kept.serial:
            return self.status  # a broker restored from its last save; the server publishes the present ones
        why = event.rejected or (Failure.REPLAYED if message.serial < self._kept.serial else "")
        if not why and message.serial > self._kept.serial:
            why = self._accept(message)
        if why:
            log.warning("settings: %s; those before stay", why)
        why = why or ("" if self.config.remote_settings else Failure.LOCAL_ONLY)
        self.status = replace(self.status, why=why)
        return self.status

    def observe(self, connected: bool, denied: bool, now_s: float) -> None:
        """Note that the agent runs, and whether it is connected: leave an address that cannot be reached."""
        current, changes = self._current, dict[str, Any]()
        if self._kept.good != self._effective and not self.restart_due:
            changes["good"] = self._effective
        self._since_s = now_s if connected or self._since_s is None else self._since_s
        if connected:
            worked = [current, *(address for address in self._kept.worked if address != current)]
            changes |= {"worked": worked[:ADDRESSES]}
            if self._kept.installed is None:
                changes["installed"] = {k: v for k, v in flat(self._local).items() if k in DEFAULTS}
            if self._kept.unreached == current:
                changes["unreached"] = None
        elif not self.restart_due and len(self._addresses()) > 1:
            limit_s = RETURN_S if current in self._kept.worked else TRIAL_S
            if denied or now_s - self._since_s > limit_s:
                if current == self._desired:
                    changes["unreached"] = current
                self._keep(replace(self._kept, **changes))
                addresses = self._addresses()
                self._next = addresses[(addresses.index(current) + 1) % len(addresses)]
                log.warning("broker %s:%d: not reached; trying another address", current.host, current.port)
                self.restart_due = True
                return
        self._keep(replace(self._kept, **changes))

    def revert(self, error: EdgeFLError) -> bool:
        """Reject the values that the agent could not start with; return False if it did not fail because of new ones."""
        kept = self._kept
        new = {key for key, value in kept.values.items() if key not in kept.good or kept.good[key] != value}
        new -= kept.failed.keys()
        if not new:
            return False
        log.warning("settings: the agent does not start with %s", ", ".join(sorted(new)))
        self._keep(replace(kept, failed={**kept.failed, **dict.fromkeys(new, error.message[:400])}))
        self.begin()
        return True

    def _accept(self, message: DesiredSettings) -> str:
        """Keep a message's settings; return the failure word if the disk does not take them."""
        kept = replace(
            self._kept,
            serial=message.serial,
            values=message.values,
            failed=_unusable(message.values),
            unreached=None,
        )
        if not self._keep(kept):
            return Failure.DISK
        config, status = merged(self._local, self._kept, self._where)
        self.restart_due, self._next = config != self.config, None
        if not self.restart_due:
            self.status = status
        return ""

    def _addresses(self) -> list[BrokerAddress]:
        """The addresses of the broker to try, in order: only the desired one until settings were accepted, or if it was set locally."""
        actual = self.status.settings.get("broker.host"), self.status.settings.get("broker.port")
        local = any(each and each.origin == "local" for each in actual)
        if local or not self._kept.serial or not self.config.remote_settings:
            return [self._desired]
        first = [] if self._desired == self._kept.unreached else [self._desired]
        return list(dict.fromkeys([*first, *self._kept.worked, self._desired]))

    def _keep(self, kept: Kept) -> bool:
        """Store if something changed; return whether the disk took it."""
        if kept == self._kept:
            return True
        try:
            write_json(self._file, kept, private=True)
        except OSError as error:
            log.warning("%s: %s", text(self._file.name), error.strerror)
            return False
        self._kept = kept
        return True
