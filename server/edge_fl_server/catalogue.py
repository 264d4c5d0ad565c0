"""Descriptions of the methods, from their own declarations; `python -m edge_fl_server.catalogue` writes the README's method table."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec

from edge_fl.config import InputSpec, MethodConfig, MethodSpec, ModelConfig
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.learn.tree import size_bytes
from edge_fl.methods import build_method, find, names
from edge_fl.methods.contract import hyper, steps
from edge_fl.methods.contract.egress import of_method
from edge_fl.methods.contract.method import Method
from edge_fl.methods.finetuned import FineTuned

COLUMNS = {
    "name": "name",
    "family": "family",
    "shared": "shared parts",
    "personal": "personal parts",
    "head_only": "head-only devices",
    "citation": "citation",
}
BEGIN = "<!-- methods: written by `python -m edge_fl_server.catalogue`, checked by a test -->"
END = "<!-- end of methods -->"
NOT_SUPPORTED = "not supported"
INPUT, CLASSES = InputSpec(3, 32, 32), 10  # bytes are counted for these


def rows() -> list[dict[str, str]]:
    """One row per method, sorted by name."""
    return [_row(name, sample(name)) for name in names()]


def sample(name: str, model: str = "cnn2") -> Method:
    """Build a method on a model for 32x32 colour images and ten classes."""
    classes = [str(label) for label in range(CLASSES)]
    return build_method(MethodSpec(ModelConfig(model), INPUT, classes, MethodConfig(name), 0))


def describe(name: str, model: str = "cnn2") -> str:
    """Describe a method as text: docstring, parts, bytes, egress, deviations, hyper-parameters."""
    method = sample(name, model)
    row = _row(name, method)
    down = steps.broadcast(method, steps.start(method), "c000")
    lines = [
        f"{method.title} - {method.citation}",
        "",
        inspect.getdoc(inspect.getmodule(find(name))) or "",
        "",
        f"family: {method.family}",
        *(f"{COLUMNS[key]}: {row[key]}" for key in ("shared", "personal", "head_only")),
        f"BatchNorm: {method.batch_norm.value}",
        f"down per client and round with {model}: {size_bytes(down):,} bytes ({', '.join(down) or 'nothing'})",
        f"exported for devices: {' + '.join(method.exports) or 'nothing'}",
        f"late updates (cohort.buffer_size): {'supported' if method.averages() else NOT_SUPPORTED}",
        *_egress(method),
        f"deviations: {method.deviations or 'none known'}",
        "",
        "hyper-parameters:",
        *_hypers(name),
    ]
    return "\n".join(lines)


def egress_json(name: str) -> str:
    """The egress manifest of a method as JSON: what may leave a device, by tier."""
    return msgspec.json.format(msgspec.json.encode(of_method(sample(name)))).decode()


def markdown() -> str:
    """The README's method table."""
    cells = [[row[key] for key in COLUMNS] for row in rows()]
    return tables.markdown(Table([*COLUMNS.values()], cells))


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


def _hypers(name: str) -> list[str]:
    tuning = hyper.hypers(FineTuned) if name.endswith("+ft") else {}
    lines = []
    for key, (default, limits) in {**hyper.hypers(find(name)), **tuning}.items():
        bounds = f"{_bound(limits.low, '-inf')} to {_bound(limits.high, 'inf')}"
        choices = " | ".join(map(str, limits.choices))
        source = f"; {limits.source}" if limits.source else ""
        lines.append(f"  {key} = {default!r}  ({choices or bounds})  {limits.doc}{source}")
    return lines or ["  none"]


def _bound(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"


def readme(text: str) -> str:
    """Replace the method table between the two markers of a README's text."""
    before, _, rest = text.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}{END}{after}"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "README.md"
    path.write_text(readme(path.read_text()))
