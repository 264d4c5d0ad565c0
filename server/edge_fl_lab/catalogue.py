"""Descriptions of methods, models and heads, from their own declarations."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from edge_fl import heads, plugins
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.console import units
from edge_fl.errors import ConfigError, MethodError
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import size_bytes
from edge_fl.methods import FINE_TUNED, METHODS, build_method, find, hypers, names
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import of_method
from edge_fl.models import MODELS, audio, backbones

COLUMNS = {
    "name": "name",
    "family": "family",
    "shared": "shared parts",
    "personal": "personal parts",
    "head_only": "head-only devices",
    "citation": "citation",
}
BUILT_IN = sorted([*METHODS, *FINE_TUNED])
NOT_SUPPORTED = "not supported"
INPUT, CLASSES = InputSpec((3, 32, 32)), 10  # bytes are counted for these


def rows() -> list[dict[str, str]]:
    """One row per method, sorted by name; of an installed package's method that cannot be built, the reason."""
    return [row(name) for name in names()]


def row(name: str) -> dict[str, str]:
    """The row of a method. Raises MethodError for one of edge-fl that cannot be built."""
    try:
        return _row(name, sample(name))
    except MethodError as error:
        if name in BUILT_IN:
            raise
        return dict.fromkeys(COLUMNS, "-") | {"name": name, "family": error.message}


def sample(name: str, model: str = "cnn2") -> Method:
    """Build a method on a model for 32x32 colour images and ten classes."""
    classes = [str(label) for label in range(CLASSES)]
    return build_method(MethodSpec(ModelConfig(model), INPUT, classes, MethodConfig(name), 0))


def describe(name: str, model: str = "cnn2") -> str:
    """Describe a method as text: docstring, parts, bytes, egress, deviations, hyper-parameters."""
    method, known = sample(name, model), facts(name, model)
    down = steps.broadcast(method, steps.start(method), "c000")
    lines = [
        f"{method.title} - {method.citation}",
        "",
        known["description"],
        "",
        f"family: {method.family}",
        *(f"{COLUMNS[key]}: {known[key]}" for key in ("shared", "personal", "head_only")),
        f"BatchNorm: {method.batch_norm.value}",
        f"down per client and round with {model}: {units.size(known['bytes_down'])} ({', '.join(down) or 'nothing'})",
        f"exported for devices: {' + '.join(method.exports) or 'nothing'}",
        f"late updates (cohort.buffer_size): {'supported' if known['late_updates'] else NOT_SUPPORTED}",
        *_egress(method),
        f"deviations: {known['deviations'] or 'none known'}",
        "",
        "hyper-parameters:",
        *(_hyper_line(hyper) for hyper in known["hyper_parameters"]),
        *(["  none"] * (not known["hyper_parameters"])),
    ]
    return "\n".join(lines)


def facts(name: str, model: str = "cnn2") -> dict[str, Any]:
    """A method's row and everything else that `describe` says, for JSON."""
    method, found = sample(name, model), find(name)
    return {
        **_row(name, method),
        "title": method.title,
        "description": inspect.getdoc(inspect.getmodule(found)) or inspect.cleandoc(found.__doc__ or ""),
        "batch_norm": method.batch_norm.value,
        "bytes_down": size_bytes(steps.broadcast(method, steps.start(method), "c000")),
        "model": model,
        "exported": list(method.exports),
        "late_updates": method.averages(),
        "egress": of_method(method),
        "deviations": method.deviations,
        "hyper_parameters": _hypers(name),
    }


def egress_json(name: str) -> str:
    """The egress manifest of a method as JSON: what may leave a device, by tier."""
    return msgspec.json.format(msgspec.json.encode(of_method(sample(name)))).decode()


def _row(name: str, method: Method) -> dict[str, str]:
    tier = method.head_tier
    return {
        "name": name,
        "family": method.family,
        "shared": ", ".join(method.travelling()) or "-",
        "personal": ", ".join(part for part, spec in method.parts.items() if not spec.travels) or "-",
        "head_only": NOT_SUPPORTED if tier.kind == "none" else f"{tier.kind}: {tier.trains}",
        "citation": method.citation,
    }


def _egress(method: Method) -> list[str]:
    """What may leave a device, by tier; numbers and messages are the same for all methods."""
    lines = []
    for egress in of_method(method):
        parts = {kind: ", ".join(names) or "nothing" for kind, names in egress.parts.items()}
        lines += [
            f"leaves a {egress.tier} device with its {kind} report: {names}" for kind, names in parts.items()
        ]
    return lines


def _hypers(name: str) -> list[dict[str, Any]]:
    return [
        {"name": key, "default": default, **dataclasses.asdict(limits)}
        for key, (default, limits) in hypers(name).items()
    ]


def _hyper_line(hyper: Mapping[str, Any]) -> str:
    bounds = f"{_bound(hyper['low'], '-inf')} to {_bound(hyper['high'], 'inf')}"
    choices = " | ".join(map(str, hyper["choices"]))
    source = f"; {hyper['source']}" if hyper["source"] else ""
    return f"  {hyper['name']} = {hyper['default']!r}  ({choices or bounds})  {hyper['doc']}{source}"


def _bound(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"


def models() -> list[dict[str, str]]:
    """One row per model; `weights` says where those of pretrained networks are."""
    pretrained = [
        {
            "name": name,
            "options": "seconds" if name == audio.SPEECH else "size",
            "description": description,
            "weights": found,
        }
        for name, (description, found) in backbones.listing().items()
    ]
    own = [
        {
            "name": name,
            "options": ", ".join(
                f"{p.name}={p.default!r}" for p in [*inspect.signature(build).parameters.values()][1:]
            ),
            "description": _first_line(build),
            "weights": "",
        }
        for name, build in MODELS.items()
    ]
    return own + pretrained


def personal_heads() -> list[dict[str, str]]:
    """One row per head that can be chosen; of an installed package's head that cannot be imported, the reason."""
    packages = plugins.names(heads.ENTRY_POINTS)
    rows = []
    for name in heads.names():
        origin = "edge-fl" if name in heads.HEADS else packages[name]
        try:
            description = _first_line(heads.find(name))
        except ConfigError as error:
            description = error.message
        rows.append({"name": name, "package": origin, "description": description})
    return rows


def _first_line(documented: Any) -> str:
    """The first paragraph of a docstring, in one line; "" without one of its own."""
    return " ".join((documented.__doc__ or "").split("\n\n")[0].split())
