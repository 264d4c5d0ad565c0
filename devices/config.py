"""What a person sets on one device: a TOML file of a dozen lines, or the same as options of `edge-fl device run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from devices.board.usage import Budget
from edge_fl import config as settings
from edge_fl import heads
from edge_fl.errors import ConfigError
from edge_fl.heads.auto import AUTO
from edge_fl.wire import identity
from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint

FOLDER = "device"


class DeviceBroker(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the broker is (port 0: 8883 with an identity, else 1883), and the folder of this device's identity."""

    host: Annotated[str, Meta(pattern=r"^[^\s/@]+\Z")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    fleet: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")] = "main"
    identity: str = ""

    @property
    def address(self) -> Endpoint:
        """Where it listens, without what it takes to be let in."""
        return Endpoint(self.host, self.port or (TLS_PORT if self.identity else PORT))

    @property
    def endpoint(self) -> Endpoint:
        """As the transport takes it. Raises ConfigError for an identity that cannot be used."""
        return identity.endpoint(self.host, self.port, self.identity)


class DeviceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One device. `data` is one of `devices.data.sources`; `tier` limits what is measured; `root` is the release root it was shipped with.

    With `uploads` off a head-only device sends numbers only, whatever parts a method could use (class means, a copy of its head, ...).
    `head` may be "auto": the kind that validates best within `head_budget_s`. `balanced` lets every class count the same, however many
    images it has; with `guard` a new pair that is worse on held-out images than the one that serves does not replace it.
    Of its data it uses the `classes` named, all without, and at most `keep` images, by `policy`. Every `watch_s` it looks for new ones
    (0: never), and fits anew at most every `refit_every_s`.
    `epsilon` is the most that its updates may ever tell of its data, at delta 1e-5, whatever a task allows (0: what the task says).
    Of a release's extractors `precision` "auto" takes int8 where floats need too much memory, or more than `latency_ms` for one image.
    `mirror` is the web address of an exported repository: a release's bytes come from there first, and the rest from the broker.
    """

    id: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")]
    data: str
    tier: Literal["auto", "head", "full"] = "auto"
    head: str = "logistic"
    folder: str = FOLDER
    root: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    head_budget_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    balanced: bool = False
    classes: list[str] = []
    keep: Annotated[int, Meta(ge=0)] = 0
    policy: Literal["newest", "reservoir"] = "newest"
    watch_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    refit_every_s: Annotated[float, Meta(ge=0, le=86_400 * 30)] = 300.0
    guard: bool = True
    threads: Annotated[int, Meta(ge=1)] = 1
    uploads: bool = True
    epsilon: Annotated[float, Meta(ge=0)] = 0.0
    budget: Budget = Budget()
    precision: Literal["auto", "fp32", "int8"] = "auto"
    latency_ms: Annotated[float, Meta(gt=0)] = 250.0
    mirror: Annotated[str, Meta(pattern=r"^(https?://[^\s?#]+)?\Z")] = ""
    broker: DeviceBroker = DeviceBroker()


def load(path: Path) -> dict[str, object]:
    """The settings in a TOML file, not yet checked. Raises ConfigError."""
    return settings.read(path)


def named(tree: dict[str, object], where: str) -> dict[str, object]:
    """The settings with the name on the certificate, where there is one. Raises ConfigError when they give the device another."""
    broker = tree.get("broker")
    folder = broker.get("identity") if isinstance(broker, dict) else None
    if not folder or not isinstance(folder, str):
        return tree
    name = identity.read(Path(folder)).device
    if tree.get("id", name) != name:
        raise ConfigError(
            f"{where}: id = {tree['id']!r}, but the identity in {folder} is that of {name!r}; expected one name"
        )
    return {**tree, "id": name}


def convert(tree: dict[str, object], where: str) -> DeviceConfig:
    """The settings as a value. Raises ConfigError, which names the nearest known key."""
    config = settings.checked(tree, DeviceConfig, where)
    try:
        if config.head != AUTO:
            heads.find(config.head)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; {AUTO!r} chooses among them") from error
    return config


def chosen(file: Path | None, given: Mapping[str, object], broker: Mapping[str, object]) -> DeviceConfig:
    """The settings in `file`, if any, with what was given on the command line in their place. Raises ConfigError."""
    tree = load(file) if file else {}
    tree |= {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None
    }
    if at := {name: value for name, value in broker.items() if value is not None}:
        own = tree.get("broker")
        tree["broker"] = {**(own if isinstance(own, dict) else {}), **at}
    where = str(file) if file else "device run"
    return convert(named(tree, where), where)
