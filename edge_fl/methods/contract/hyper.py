"""Hyper-parameters of methods: dataclass fields with range, description and source of the default."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_fl.errors import MethodError, nearest


@dataclass(frozen=True)
class Hyper:
    """Description, allowed values (closed range [low, high], or `choices`) and source of a hyper-parameter."""

    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    source: str = ""


def hyper(default: Any, doc: str, **limits: Any) -> Any:
    """A dataclass field with a `Hyper`; keywords: low, high, choices, source ("[P]" paper, "[C]" code, "[D]" our decision)."""
    return dataclasses.field(default=default, metadata={"hyper": Hyper(doc, **limits)})


def hypers(method: type) -> dict[str, tuple[Any, Hyper]]:
    """Default and `Hyper` of every hyper-parameter of a method, by name."""
    return {
        f.name: (f.default, f.metadata["hyper"]) for f in dataclasses.fields(method) if "hyper" in f.metadata
    }


def check(method: str, values: dict[str, Any], known: dict[str, tuple[Any, Hyper]]) -> None:
    """Raises MethodError for an unknown name, a wrong type or a value out of range."""
    for name, value in values.items():
        if name not in known:
            raise MethodError(f"method {method}: unknown hyper-parameter {name!r}{nearest(name, known)}")
        default, limits = known[name]
        if wrong := _wrong(value, default, limits):
            raise MethodError(f"method {method}: {name} = {value!r}, expected {wrong}")


def _wrong(value: Any, default: Any, limits: Hyper) -> str:
    if limits.choices and value not in limits.choices:
        return "one of " + ", ".join(map(repr, limits.choices))
    if isinstance(default, bool) != isinstance(value, bool) and not limits.choices:
        return "true or false" if isinstance(default, bool) else type(default).__name__
    if isinstance(default, int | float) and not isinstance(value, int | float):
        return "a number"
    if isinstance(default, int) and not isinstance(value, int):
        return "a whole number"
    if isinstance(value, Sequence) or value is None:
        return ""
    below = limits.low is not None and not value >= limits.low
    above = limits.high is not None and not value <= limits.high
    if below or above:
        return f"{'-inf' if limits.low is None else limits.low} to {'inf' if limits.high is None else limits.high}"
    return ""
