"""Selectors: expressions over the tags and attributes of devices, such as ``site=berlin and not arch=armv7l``, and the devices that match.

    site=berlin and (tier=full or not arch=armv7l)      tags and attributes
    memory_mb>=1024, agent<0.2.0                         numbers and versions: = != < <= > >=
    site=berlin,paris                                    one of several values
    pi-0*, name=pi-0*                                    device names; * and ? stand for any characters
    @cameras                                             a saved group

    selectors.parse("site=berlin").matches({"name": "pi-07", "site": "berlin"})
    selectors.selected(db, "main", "@berlin or pi-0*")   names of devices, from the registry

A key is an attribute (`edge_fl.fleet.tags`) or a tag. Without a value `site=*` does not match a device, `site!=berlin` does. Of the
registry only the tags and attributes that a selector compares are read.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from operator import eq, ge, gt, le, lt
from typing import Any

from packaging.version import Version
from sqlalchemy import ColumnElement, select

from edge_fl.errors import ConfigError, EdgeFLError, nearest, shortened, similar
from edge_fl.fleet import tags
from edge_fl.fleet.tags import KEY, NUMBERS, VERSIONS
from edge_fl_server.registry import Database, registered_devices, registered_tags
from edge_fl_server.registry.registered_devices import STANDING, of_fleet
from edge_fl_server.registry.tables import devices

WORDS = ("and", "or", "not")
MAX_LENGTH, MAX_DEPTH = 1000, 50
MAX_VALUES = 2000  # compared for one device, those of groups counted wherever a group is used
TOKEN = re.compile(r"[()]|[<>!]=|[=<>]|@?[\w.*?:/+,-]+")
NUMBER = re.compile(r"\d{1,15}(\.\d{1,15})?\Z", re.ASCII)
EXPECTED = "a device name, key=value, @group, 'not' or '('"

Value = str | float
Device = Mapping[str, Value]
"""The tags and attributes of one device, with its `name`."""
Expression = Callable[[Device], bool]
"""Whether a device matches."""
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {"=": eq, "<": lt, ">": gt, "<=": le, ">=": ge}
log = logging.getLogger(__name__)
REFRESH_S = 5.0
_ABLE = devices.c.capability
ATTRIBUTES: dict[str, ColumnElement[Any]] = {
    "name": devices.c.device,
    "status": devices.c.status,
    "standing": STANDING,
    "activity": devices.c.activity,
    "why": devices.c.why,
    "tier": _ABLE["tier"].as_string(),
    "head": _ABLE["head"].as_string(),
    "arch": _ABLE["machine"].as_string(),
    "python": _ABLE["python"].as_string(),
    "onnxruntime": _ABLE["onnxruntime"].as_string(),
    "agent": _ABLE["agent"].as_string(),
    "release": devices.c.release,
    "samples": _ABLE["samples"].as_integer(),
    "memory_mb": _ABLE["memory_mb"].as_integer(),
    "disk_free_mb": _ABLE["disk_free_mb"].as_integer(),
    "drift": _ABLE["drift"].as_float(),
}
"""Attribute -> its column in the registry."""


class SelectorError(ConfigError):
    """A selector that cannot be parsed."""


@dataclass(frozen=True)
class Selector:
    """A parsed selector: its text, its expression, the keys that it compares, and (key, value) of the values without wildcards."""

    text: str
    matches: Expression
    keys: frozenset[str]
    values: frozenset[tuple[str, str]] = frozenset()


def parse(text: str, groups: Mapping[str, str] | None = None) -> Selector:
    """Parse a selector; `groups` are the saved selectors by name. Raises SelectorError, which names the position."""
    parser = _Parser(text, _Groups(groups or {}))
    return Selector(text, parser.whole(), frozenset(parser.keys), frozenset(parser.compared))


def require_groups(groups: Mapping[str, str]) -> None:
    """Parse all saved selectors. Raises SelectorError."""
    known = _Groups(groups)
    for name in groups:
        _Parser(f"@{name}", known).whole()


@dataclass(frozen=True)
class _Group:
    """A parsed group: its expression, keys, number of values, and levels of 'not', '(' and groups."""

    expression: Expression
    keys: frozenset[str]
    values: int
    levels: int


class _Groups:
    """The saved selectors of a fleet; each is parsed once."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.parsed: dict[str, _Group] = {}


class _Parser:
    """A recursive descent over the tokens of one selector, which is used at the `depth` of another one, within groups."""

    def __init__(self, text: str, groups: _Groups, within: tuple[str, ...] = (), depth: int = 0) -> None:
        self._text, self._groups, self._within = text, groups, within
        self._tokens = self._split()
        self._next, self._depth, self._deepest = 0, depth, depth
        self.keys: set[str] = set()
        self.compared: set[tuple[str, str]] = set()
        self.values = 0

    def whole(self) -> Expression:
        """The expression of all tokens."""
        found = self._any()
        if self._next < len(self._tokens):
            raise self._error("expected 'and', 'or' or the end")
        return found

    def _split(self) -> list[tuple[str, int]]:
        """(token, position from 1) of the whole text."""
        if len(self._text) > MAX_LENGTH:
            raise SelectorError(
                f"selector {self._text[:40]!r}...: {len(self._text)} characters, expected at most {MAX_LENGTH}"
            )
        tokens, at = [], 0
        while at < len(self._text):
            if self._text[at].isspace():
                at += 1
            elif found := TOKEN.match(self._text, at):
                tokens.append((found[0], at + 1))
                at = found.end()
            else:
                raise SelectorError(
                    f"selector {self._text!r}: position {at + 1}: {self._text[at]!r}, expected {EXPECTED}"
                )
        return tokens

    @property
    def _token(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _error(self, expected: str) -> SelectorError:
        if self._next < len(self._tokens):
            token, at = self._tokens[self._next]
            return SelectorError(f"selector {self._text!r}: position {at}: {token!r}, {expected}")
        return SelectorError(f"selector {self._text!r}: position {len(self._text) + 1}: ends, {expected}")

    def _any(self) -> Expression:
        return self._joined("or", self._all, any)

    def _all(self) -> Expression:
        return self._joined("and", self._one, all)

    def _joined(
        self, word: str, part: Callable[[], Expression], combine: Callable[[Iterable[bool]], bool]
    ) -> Expression:
        """One part, or several with a word between them."""
        found = [part()]
        while self._token == word:
            self._next += 1
            found.append(part())
        return found[0] if len(found) == 1 else lambda device: combine(one(device) for one in found)

    def _one(self) -> Expression:
        token = self._token
        if token == "not":
            self._descend()
            self._next += 1
            inner = self._one()
            self._depth -= 1
            return _not(inner)
        if token == "(":
            self._descend()
            self._next += 1
            found = self._any()
            self._depth -= 1
            if self._token != ")":
                raise self._error("expected ')'")
            self._next += 1
            return found
        if token.startswith("@"):
            found = self._group(token[1:])
            self._next += 1
            return found
        if not token or token in WORDS or not _is_word(token):
            raise self._error(f"expected {EXPECTED}")
        self._next += 1
        operator = self._token
        if operator in COMPARISONS or operator == "!=":
            key, at = self._tokens[self._next - 1]
            if key not in tags.ATTRIBUTES and not KEY.match(key):
                raise SelectorError(
                    f"selector {self._text!r}: position {at}: {key!r}, expected a key: a tag or one of {', '.join(tags.ATTRIBUTES)}"
                )
            self._next += 1
            return self._comparison(key, operator)
        self.keys.add("name")
        return _text("name", self._patterns("name", token))

    def _descend(self, levels: int = 1) -> None:
        """Go one level down; `levels` are needed there."""
        if self._depth + levels > MAX_DEPTH:
            raise self._error(f"expected at most {MAX_DEPTH} levels of 'not', '(' and groups")
        self._deepest = max(self._deepest, self._depth + levels)
        self._depth += 1

    def _count(self, values: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise self._error(
                f"expected at most {MAX_VALUES:,} values, with those of the groups wherever they are used"
            )

    def _patterns(self, key: str, text: str) -> re.Pattern[str]:
        """A pattern for comma-separated values of a key in which * and ? stand for any characters."""
        values = text.split(",")
        self._count(len(values))
        self.compared |= {(key, value) for value in values if not set(value) & set("*?")}
        return re.compile("|".join(map(translate, values)))

    def _comparison(self, key: str, operator: str) -> Expression:
        """The comparison with the value that comes next."""
        value = self._token
        if not value or not _is_word(value):
            raise self._error(f"expected a value for {key}")
        compared = COMPARISONS["=" if operator == "!=" else operator]
        if key in NUMBERS:
            if not NUMBER.match(value):
                raise self._error(f"expected a number: {key} is one")
            self._count(1)
            equal = _number(key, compared, float(value))
        elif operator in ("=", "!="):
            equal = _text(key, self._patterns(key, value))
            if key in VERSIONS and (bound := version(value)):  # 0.2 is 0.2.0
                equal = _version(key, compared, bound)
        elif key in VERSIONS:
            if (bound := version(value)) is None:
                raise self._error(f"expected a version, such as 0.2.0: {key} is one")
            self._count(1)
            equal = _version(key, compared, bound)
        else:
            ordered = (*NUMBERS, *VERSIONS)
            raise self._error(
                f"expected = or != before it: {key} is no number or version, only {', '.join(ordered)} are{similar(key, ordered)}"
            )
        self._next += 1
        self.keys.add(key)
        return _not(equal) if operator == "!=" else equal

    def _group(self, name: str) -> Expression:
        """The expression of a saved group."""
        if name in self._within:
            raise self._error(
                f"expected a group that does not contain itself: {' > '.join((*self._within, name))}"
            )
        if name not in self._groups.texts:
            raise self._error(f"expected a saved group{nearest(name, self._groups.texts)}")
        group = self._groups.parsed.get(name)
        self._descend(1 + group.levels if group else 1)
        if group is None:
            group = self._groups.parsed[name] = self._parsed(name)
            self._deepest = max(self._deepest, self._depth + group.levels)
        self._depth -= 1
        self._count(group.values)
        self.keys |= group.keys
        return group.expression

    def _parsed(self, name: str) -> _Group:
        parser = _Parser(self._groups.texts[name], self._groups, (*self._within, name), self._depth)
        found = parser.whole()
        return _Group(found, frozenset(parser.keys), parser.values, parser._deepest - self._depth)


def _text(key: str, pattern: re.Pattern[str]) -> Expression:
    """A tag or text attribute has a value that one of the patterns matches."""

    def matches(device: Device) -> bool:
        value = device.get(key)
        return value is not None and pattern.match(str(value)) is not None

    return matches


def _number(key: str, holds: Callable[[float, float], bool], bound: float) -> Expression:
    """A number compares with a bound; false for a device without the number."""

    def matches(device: Device) -> bool:
        value = device.get(key)
        return isinstance(value, int | float) and holds(value, bound)

    return matches


def _version(key: str, holds: Callable[[Version, Version], bool], bound: Version) -> Expression:
    """A version compares with a bound; false for a device without one, or with one that is none."""

    def matches(device: Device) -> bool:
        found = version(str(device.get(key, "")))
        return found is not None and holds(found, bound)

    return matches


@lru_cache(maxsize=1024)
def version(text: str) -> Version | None:
    """The version of this text, in the order of Python packages: 0.9.0 is before 0.10.0; None for anything else."""
    try:
        return Version(text)
    except ValueError:  # InvalidVersion is one, and so are digits beyond Python's limit
        return None


def _not(inner: Expression) -> Expression:
    return lambda device: not inner(device)


def _is_word(token: str) -> bool:
    return token[0] not in "()=<>!@"


def parsed(db: Database, fleet: str, text: str) -> Selector:
    """Parse a selector with the fleet's groups. Raises SelectorError."""
    return parse(text, registered_tags.saved_groups(db, fleet))


def selected(db: Database, fleet: str, selector: Selector | str) -> list[str]:
    """The names of the devices that a selector matches, ascending. Raises SelectorError."""
    if isinstance(selector, str):
        selector = parsed(db, fleet, selector)
    names = sorted(selector.keys & ATTRIBUTES.keys() | {"name"})
    query = select(*(ATTRIBUTES[name].label(name) for name in names)).where(of_fleet(fleet))
    keys = selector.keys - ATTRIBUTES.keys()
    tagged = registered_tags.of_devices(db, fleet, keys) if keys else {}
    matching = []
    for row in db.rows(query.order_by(devices.c.device)):
        values = {name: value for name, value in zip(names, row, strict=True) if value not in (None, "")}
        device: dict[str, Value] = {**values, **tagged.get(values["name"], {})}
        if selector.matches(device):
            matching.append(values["name"])
    return matching


def mistyped(db: Database, fleet: str, selector: Selector) -> str:
    """Format a hint for the keys and values of a selector that no device of the fleet has; empty if there are none."""
    names = registered_devices.names(db, fleet)
    tags = registered_tags.of_devices(db, fleet)
    values: dict[str, set[str]] = {"name": set(names)}
    for key, value in (tag for name in names for tag in tags.get(name, {}).items()):
        values.setdefault(key, set()).add(value)
    known = sorted(values.keys() - {"name"})
    lists = f" (tags: {shortened(known) or 'none'}; attributes: {', '.join(ATTRIBUTES)})"
    hints = [
        f"the tag {key!r}{similar(key, [*known, *ATTRIBUTES]) or lists}"
        for key in sorted(selector.keys - {*known, *ATTRIBUTES})
    ]
    hints += [
        f"the {'name' if key == 'name' else f'tag {key}'} {value!r}{nearest(value, values[key])}"
        for key, value in sorted(selector.values)
        if value not in values.get(key, {value})
    ]
    return "".join(f"; no device has {hint}" for hint in hints)


class Selection:
    """The devices that a selector matches at present, read again after REFRESH_S; all devices for an empty selector.

    `device in selection` is safe from any thread. While the registry fails, or the selector names a removed group, the devices that it
    matched last stay selected.
    """

    def __init__(self, db: Database, fleet: str, text: str) -> None:
        self._db, self._fleet, self.text = db, fleet, text
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        self._until_s = 0.0

    def __contains__(self, device: str) -> bool:
        if not self.text:
            return True
        with self._lock:
            if time.monotonic() > self._until_s:
                self._until_s = time.monotonic() + REFRESH_S
                try:
                    self._names = frozenset(selected(self._db, self._fleet, self.text))
                except EdgeFLError as error:
                    log.warning("%s; %d devices stay selected", error.message, len(self._names))
            return device in self._names


def require(db: Database, fleet: str, *texts: str) -> None:
    """Check selectors before something depends on them; empty ones are skipped. Raises SelectorError."""
    for text in filter(None, texts):
        parsed(db, fleet, text)
