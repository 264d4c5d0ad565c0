"""Reference pages from the code: the command line, settings, messages, the Python interface, and the notebook as a page."""

import inspect
import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec import Struct
from msgspec.inspect import Field, FloatType, IntType, LiteralType, StructType, Type, UnionType
from typer.cli import get_docs_for_click
from typer.main import get_command

from edge_fl import cli, heads
from edge_fl.blob import Blob
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifests import Manifest
from edge_fl.wire import messages
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.serving.predict import Prediction, Predictor
from edge_fl_lab import research
from edge_fl_server.recipes.recipe import Recipe

FOLDED_FROM = 90
EXAMPLE = re.compile(r"^(edge-fl .+)$", re.MULTILINE)
SHORTENED = re.compile(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", re.MULTILINE)
"""A list of the commands of a group with shortened help, which follows in full."""

NOTEBOOK = Path(__file__).parents[2] / "docs/notebook.ipynb"
INTERFACE = {
    "edge_fl_lab.research": (research.run, research.compare, research.Result, research.Comparison),
    "edge_fl_devices.serving.predict": (Predictor, Prediction),
    "edge_fl.methods.contract.method": (Method,),
    "edge_fl.heads": (heads.fit, heads.from_arrays),
}
"""The public functions and classes of each module."""


def pages() -> dict[str, str]:
    """The text of every page, by its path below docs/."""
    return {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/messages.md": wire(),
        "reference/python.md": interface(),
        "reference/notebook.md": notebook(),
    }


def commands() -> str:
    """All commands with their arguments and options, from the help of the command line."""
    loaded = cli.load(metadata.entry_points(group=cli.ENTRY_POINTS))
    command = get_command(loaded.root)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="edge-fl", title="Commands")
    return EXAMPLE.sub(r"**Example**:\n\n```console\n$ \1\n```", SHORTENED.sub("", text))


def settings() -> str:
    """The tables of a recipe and of a device's settings, with types and defaults."""
    return "\n".join(
        [
            "# Settings",
            "",
            "`--set KEY=VALUE` changes a setting of a recipe: `--set cohort.deadline_s=60`.",
            "",
            "## Recipe",
            "",
            *_section(Recipe, "recipe"),
            "## Device",
            "",
            *_section(DeviceConfig, "device"),
        ]
    )


def wire() -> str:
    """Every message with its fields."""
    kinds = [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__module__ == messages.__name__
    ]
    lines = [
        "# Messages",
        "",
        "Each message is one JSON object. [The protocol](../protocol.md) says when it is sent, and on which topic.",
        "",
    ]
    for kind in [*kinds, Blob, Manifest]:
        lines += [f"## {kind.__name__}", "", *_struct(kind)]
    return "\n".join(lines)


def interface() -> str:
    """Signatures and docstrings of the public functions and classes."""
    lines = ["# Python", ""]
    for module, members in INTERFACE.items():
        lines += [f"## `{module}`", ""]
        for member in members:
            lines += _documented(member.__name__, member, "###")
            if inspect.isclass(member):
                for name, value in vars(member).items():
                    if not name.startswith("_") and (
                        inspect.isfunction(value) or isinstance(value, property)
                    ):
                        lines += _documented(f"{member.__name__}.{name}", value, "####")
    return "\n".join(lines)


def notebook() -> str:
    """The notebook with its stored output."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n\n".join(text for cell in cells for text in _cell(cell)).replace("](", "](../")


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", []):
        text = output.get("text") or output["data"]["text/plain"]
        yield f"```text\n{''.join(text).rstrip()}\n```"


def _documented(name: str, value: Any, heading: str) -> list[str]:
    lines = [f"{heading} `{name}`", ""]
    if not isinstance(value, property):
        arguments = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))
        lines += ["```python", name.rpartition(".")[2] + _folded(arguments), "```", ""]
    return [*lines, inspect.getdoc(value) or "", ""]


def _folded(arguments: str) -> str:
    """A signature with one argument per line if it is long."""
    if len(arguments) < FOLDED_FROM:
        return arguments
    inside, closing, result = arguments[1:].rpartition(")")
    return "(\n    " + re.sub(r", (?=\*|\w+:)", ",\n    ", inside) + f",\n{closing}{result}"


def _section(kind: type[Struct], name: str, heading: str = "###") -> list[str]:
    """The table of a struct, then those of the structs that it contains, which are sections of the TOML file."""
    lines = _struct(kind)
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        if isinstance(field.type, StructType):
            inner = field.name if name in ("recipe", "device") else f"{name}.{field.name}"
            lines += [f"{heading} `[{inner}]`", "", *_section(field.type.cls, inner, heading)]
    return lines


def _struct(kind: type[Struct]) -> list[str]:
    fields = [
        f
        for f in msgspec.inspect.type_info(kind).fields
        if not _is_section(f)  # type: ignore[attr-defined]
    ]
    rows = [f"| `{f.name}` | {_type(f.type)} | {_default(f)} |" for f in fields]
    table = ["| key | type | default |", "| --- | --- | --- |", *rows] if rows else []
    return [inspect.getdoc(kind) or "", "", *table, ""]


def _is_section(field: Field) -> bool:
    return isinstance(field.type, StructType) and not field.required


def _default(field: Field) -> str:
    if field.required:
        return "required"
    if msgspec.NODEFAULT is field.default and msgspec.NODEFAULT is field.default_factory:
        return "absent"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{json.dumps(msgspec.to_builtins(value))}`"


def _type(kind: Type) -> str:
    """A type with its limits, such as "float, above 0, at most 1"."""
    if isinstance(kind, LiteralType):
        return " or ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, UnionType):
        return " or ".join(_type(inner) for inner in kind.types)
    if isinstance(kind, StructType):
        return f"`{kind.cls.__name__}`"
    name = type(kind).__name__.removesuffix("Type").lower().replace("vartuple", "list")
    if isinstance(kind, IntType | FloatType):
        words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
        limits = [f"{words[key]} {getattr(kind, key)}" for key in words if getattr(kind, key) is not None]
        return ", ".join([name, *limits])
    inner = getattr(kind, "item_type", None) or getattr(kind, "value_type", None)
    return f"{name} of {_type(inner)}" if inner else name
