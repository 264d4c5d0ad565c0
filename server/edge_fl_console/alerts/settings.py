"""The alerts of a fleet: channels and rules in HOME/FLEET/alerts.toml; without the file the default rules, and no channel."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from edge_fl import toml
from edge_fl.errors import ConfigError, nearest
from edge_fl.fields import Name
from edge_fl.files.paths import text
from edge_fl_console.alerts.rules import KINDS
from edge_fl_server import selectors
from edge_fl_server.registry import Database

FILE = "alerts.toml"


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """When to raise an alert.

    kind: the condition, by default the rule's name. limit: its threshold, by default that of the kind. where: the devices that it
    watches ("": all). channels: where its alerts go (none given: to all). enabled: false turns the rule off.
    """

    kind: str = ""
    limit: Annotated[float, Meta(ge=0)] | None = None
    where: str = ""
    channels: list[str] | None = None
    enabled: bool = True


class AlertSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Channels by name with their Apprise URLs, and rules by name; rules that are not named have their defaults.

    Alerts of `group_s` seconds are sent in one message; an alert is resolved when its condition has not held for `settle_s`.
    """

    channels: dict[Name, str] = {}
    rules: dict[Name, Rule] = {}
    group_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    settle_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0

    def limit(self, name: str) -> float:
        """The threshold of a rule."""
        rule = self.rules[name]
        return KINDS[rule.kind].limit if rule.limit is None else rule.limit

    def rules_of(self, channel: str) -> set[str]:
        """The rules whose alerts go to a channel."""
        return {
            name for name, rule in self.rules.items() if rule.channels is None or channel in rule.channels
        }


def path_of(home: Path, fleet: str) -> Path:
    """The file with the alerts of a fleet, next to its releases."""
    return home / fleet / FILE


def load(path: Path, db: Database, fleet: str) -> AlertSettings:
    """Read the settings; every enabled rule has its kind. Raises ConfigError."""
    found = toml.checked(toml.read(path), AlertSettings, text(path)) if path.exists() else AlertSettings()
    rules = {name: Rule() for name in KINDS} | found.rules
    for name, rule in rules.items():
        kind = rule.kind or name
        where = f"{text(path)}: rules.{name}"
        if kind not in KINDS:
            raise ConfigError(f"{where}.kind: {kind!r}{nearest(kind, KINDS)}")
        if unknown := sorted(set(rule.channels or ()) - found.channels.keys()):
            raise ConfigError(
                f"{where}.channels: {unknown[0]!r}{nearest(unknown[0], found.channels)}, expected one of [channels]"
            )
        if rule.where and not KINDS[kind].of_devices:
            raise ConfigError(f"{where}.where: a rule of kind {kind} watches no devices, expected none")
        try:
            selectors.require(db, fleet, rule.where)
        except ConfigError as error:
            raise ConfigError(f"{where}.where: {error.message}") from error
        rules[name] = replace(rule, kind=kind)
    return replace(found, rules={name: rule for name, rule in rules.items() if rule.enabled})
