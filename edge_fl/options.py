"""Options of commands: how one is declared, groups of them, and those that several packages share. Imports nothing heavy.

An option is written as in the help: `Annotated[float, option("--wait SECONDS", "Longest time to wait.", CONNECTION, min=1)]`. Options that
belong together are the fields of a frozen dataclass; a command takes it as one parameter and typer sees its fields (`Expanded`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, update_wrapper
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from edge_fl.console.output import Format
from edge_fl.errors import ConfigError

LOOPBACK = "127.0.0.1"
CONNECTION, FOLDERS, DATA, TRAINING = "Connection", "Folders", "Data", "Training"  # headings in the help


def option(usage: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option: `usage` holds its names and what it takes, such as "--out FOLDER"; `more` is passed to typer."""
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = " ".join(usage.split()[len(names) :]) or None
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=help, **more)


class Expanded:
    """A command whose parameters that are dataclasses are replaced by their fields.

    The signature is built when typer reads it, which it does for the command that runs, not for all that are listed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        hints = get_type_hints(self._function, include_extras=True)
        given = signature(self._function).parameters
        return {
            name: each.replace(annotation=hints.get(name, each.annotation)) for name, each in given.items()
        }

    @cached_property
    def __signature__(self) -> Signature:
        found: list[Parameter] = []
        for each in self._parameters.values():
            found += _options(each.annotation) if _is_group(each) else [each]
        return Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in found])

    def __call__(self, **values: Any) -> Any:
        for name, each in self._parameters.items():
            if _is_group(each):
                given = {field.name: values.pop(field.name) for field in fields(each.annotation)}
                values[name] = each.annotation(**given)
        return self._function(**values)


def _is_group(parameter: Parameter) -> bool:
    return is_dataclass(parameter.annotation)


def _options(group: Any) -> list[Parameter]:
    """The fields of a group of options as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def fleet_name(name: str | None) -> str | None:
    """Validate the fleet name of an option. Raises ConfigError if it cannot be part of a topic."""
    from edge_fl.fields import EXPECTED_NAME
    from edge_fl.wire.topics import NAME

    if name is not None and not NAME.match(name):
        raise ConfigError(f"--fleet {name[:100]}: {EXPECTED_NAME}")
    return name


FormatOption = Annotated[
    Format, option("--format table|json", "Output format: table for reading, JSON for scripts.")
]
YesOption = Annotated[bool, option("--yes", "Do not ask for confirmation.")]
IDENTITIES = Path("runs/identities")
IdentitiesOption = Annotated[
    Path,
    option("--identities FOLDER", "Folder of the certificate authority; do not copy it to devices.", FOLDERS),
]
CertOption = Annotated[
    Path | None, option("--cert FILE", "Certificate of this service for TLS (PEM).", CONNECTION)
]
KeyOption = Annotated[Path | None, option("--key FILE", "Private key of --cert (PEM).", CONNECTION)]
WAIT = "Longest time to wait, in seconds"
DATA_DIR = option("--data-dir FOLDER", "Folder of the datasets' .npz files.", DATA)
PortOption = Annotated[
    int | None,
    option(
        "--port N", "Port of the broker [8883 with an identity, else 1883].", CONNECTION, min=1, max=65535
    ),
]


@dataclass(frozen=True, kw_only=True)
class BrokerAddressOptions:
    """The broker to connect to, and as whom."""

    host: Annotated[str | None, option("--host HOST", "Host of the broker [127.0.0.1].", CONNECTION)] = None
    port: PortOption = None
    identity: Annotated[
        Path | None,
        option(
            "--identity FOLDER",
            "Identity folder: this client's certificate (edge-fl fleet enrol), or username and password; enables TLS [plaintext].",
            CONNECTION,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(BrokerAddressOptions):
    """The broker and the fleet, where options replace what a file of settings says."""

    fleet: Annotated[
        str | None,
        option(
            "--fleet FLEET",
            "Name of the fleet; it may be new, as devices wait for their server [main].",
            CONNECTION,
            callback=fleet_name,
        ),
    ] = None

    def given(self) -> dict[str, object]:
        """The settings that were given, by the names that they have in a file."""
        values = {
            "host": self.host,
            "port": self.port,
            "fleet": self.fleet,
            "identity": self.identity and os.fspath(self.identity),
        }
        return {name: value for name, value in values.items() if value is not None}
