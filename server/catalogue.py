"""The methods as a table and one by one, from their own declarations; the README's method table is this text."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec

from edge_fl.config import InputSpec, MethodConfig, MethodSpec, ModelConfig
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
BEGIN = "<!-- methods: written by `python -m server.catalogue`, checked by a test -->"
END = "<!-- end of methods -->"
INPUT, CLASSES = InputSpec(3, 32, 32), 10  # what bytes are counted for


def rows() -> list[dict[str, str]]:
    """One row per method, by name."""
    return [_row(name, sample(name)) for name in names()]


def sample(name: str, model: str = "cnn2") -> Method:
    """A method on a model for 32x32 colour images and ten classes, to look at."""
    return build_method(
        MethodSpec(ModelConfig(model), INPUT, [str(label) for label in range(CLASSES)], MethodConfig(name), 0)
    )


def describe(name: str, model: str = "cnn2") -> str:
    """Everything about one method, as text."""
    method = sample(name, model)
    down = steps.broadcast(method, steps.start(method), "c000")
    lines = [
        f"{method.title} - {method.citation}",
        "",
        inspect.getdoc(inspect.getmodule(find(name))) or "",
        "",
        f"family: {method.family}",
        *(
            f"{key}: {value}"
            for key, value in _row(name, method).items()
            if key in ("shared", "personal", "head_only")
        ),
        f"BatchNorm: {method.batch_norm.value}",
        f"down per client and round with {model}: {size_bytes(down):,} bytes ({', '.join(down) or 'nothing'})",
        f"exported for devices: {' + '.join(method.exports) or 'nothing'}",
        f"late updates (cohort.buffer_size): {'join' if method.averages() else 'refused'}",
        *_egress(method),
        f"deviations: {method.deviations or 'none known'}",
        "",
        "hyper-parameters:",
        *_hypers(name),
    ]
    return "\n".join(lines)


def egress_json(name: str) -> str:
    """The egress manifest of a method: what may leave a device of each tier, for a machine to read."""
    return msgspec.json.format(msgspec.json.encode(of_method(sample(name)))).decode()


def markdown() -> str:
    """The README's method table."""
    keys = list(COLUMNS)
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + " --- |" * len(keys)]
    return "\n".join([*lines, *("| " + " | ".join(row[key] for key in keys) + " |" for row in rows())])


def _row(name: str, method: Method) -> dict[str, str]:
    tier = method.head_tier
    return {
        "name": name,
        "family": method.family,
        "shared": ", ".join(method.travelling()) or "-",
        "personal": ", ".join(part for part, spec in method.parts.items() if not spec.travels) or "-",
        "head_only": "refused" if tier.kind == "none" else f"{tier.kind}: {tier.trains}",
        "citation": method.citation,
    }


def _egress(method: Method) -> list[str]:
    """What may leave a device, tier by tier; numbers and messages are the same for all."""
    lines = []
    for egress in of_method(method):
        parts = {kind: ", ".join(names) or "nothing" for kind, names in egress.parts.items()}
        lines += [
            f"leaves a {egress.tier} device with its {kind} report: {names}" for kind, names in parts.items()
        ]
    return lines


def _hypers(name: str) -> list[str]:
    known: dict[str, Any] = hyper.hypers(find(name)) | (
        hyper.hypers(FineTuned) if name.endswith("+ft") else {}
    )
    lines = []
    for key, (default, limits) in known.items():
        range_ = (
            " | ".join(map(str, limits.choices)) or f"{_or(limits.low, '-inf')} to {_or(limits.high, 'inf')}"
        )
        lines.append(
            f"  {key} = {default!r}  ({range_})  {limits.doc}{'; ' + limits.source if limits.source else ''}"
        )
    return lines or ["  none of its own"]


def _or(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"


def readme(text: str) -> str:
    """A README's text with the method table between its two markers as it should be now."""
    before, _, rest = text.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(__file__).parent.parent / "README.md"
    path.write_text(readme(path.read_text()))
