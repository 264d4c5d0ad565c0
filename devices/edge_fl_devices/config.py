"""Settings of one device, from a TOML file and the options of `edge-fl device run`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from edge_fl import toml
from edge_fl.errors import ConfigError
from edge_fl.fields import Name
from edge_fl.files import atomic
from edge_fl.files.paths import is_utf8, text
from edge_fl.fleet.remote_settings import BrokerAddress, SharedSettings
from edge_fl.heads import auto
from edge_fl.secure.floors import SumFloors
from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint
from edge_fl_devices.storage import read_json

MB = 2**20
CAPTURE_SOURCE = re.compile(r"camera:\d+|(rtsps?|https?|mqtts?)://\S+|alsa:\S+|python:[\w.]+:\w+|watch:/.+")
CROP = re.compile(r"([0-9]{1,5}), ?([0-9]{1,5}), ?([1-9][0-9]{0,4}), ?([1-9][0-9]{0,4})")
"""A region of a camera's frames: x, y, width and height."""
EXPECTED_CROP = "expected x,y,w,h in pixels from the upper left corner, such as 120,40,320,240"
FOLDER, SETTINGS = "device", "settings.json"
POOL = "unlabelled"
"""In a device's folder: the pictures without a label."""
SINGLE_FILES = {".npz": "npz", ".csv": "table"}
"""Kinds of data sources that are one file, by suffix."""


class CaptureConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where files without labels come from, and how many are kept.

    `source` is "camera:NUMBER", the address of a stream (rtsp://, http://, mqtt://, alsa: or python:), or "watch:/FOLDER", whose new files
    are copied; "": none. `crop` is the region of a camera's frames that is kept, "x,y,w,h" in pixels ("": all). `every_s` is the shortest
    time between two files of one source, and the interval of looks into a watched folder. `max_pictures`, of files of any kind, and
    `max_mb` both limit the pool; the disk may hold less, of which a part stays free (`pool.SPARE_BYTES`).
    """

    source: str = ""
    crop: str = ""
    every_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 10.0
    max_pictures: Annotated[int, Meta(ge=1)] = 500
    max_mb: Annotated[float, Meta(gt=0)] = 200.0

    def __post_init__(self) -> None:
        if self.source and not CAPTURE_SOURCE.fullmatch(self.source):
            raise ValueError(
                f"source {self.source!r}: expected camera:0, rtsp://..., http://..., mqtt://..., alsa:..., python:... or watch:/folder"
            )
        if self.crop and not CROP.fullmatch(self.crop):
            raise ValueError(f"crop {self.crop!r}: {EXPECTED_CROP}")
        if self.crop and not self.has_camera:
            raise ValueError(
                f"crop {self.crop!r}: only frames of a camera can be cropped; expected camera:0, rtsp://... or http://... as the source"
            )

    @property
    def has_camera(self) -> bool:
        """Whether the source gives frames."""
        return self.source.startswith(("camera:", "rtsp", "http"))

    @property
    def max_bytes(self) -> int:
        return int(self.max_mb * MB)


class DeviceBroker(BrokerAddress, frozen=True, forbid_unknown_fields=True):
    """Address of the broker, fleet, and the folder with this device's identity."""

    fleet: Name = "main"
    identity: str = ""

    @property
    def address(self) -> Endpoint:
        """Host and port, without credentials."""
        return Endpoint(self.host, self.port or (TLS_PORT if self.identity else PORT))

    @property
    def endpoint(self) -> Endpoint:
        """Host, port and credentials. Raises ConfigError for an unusable identity."""
        from edge_fl.wire import identity  # here: `device serve` has no use for its 9 MB

        return identity.endpoint(self.host, self.port, self.identity)


class UpdateConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The owner's choices on updates of the agent.

    `automatic`: whether they are installed at all. The switch waits for the `hours` of the day, such as "1-5" or "22-4" in local time, and
    until `delay_h` hours after the device first saw the update. A new agent is confirmed once it was connected and served for
    `confirm_s`; after `trial_s` without that, the one before returns.
    """

    automatic: bool = True
    hours: Annotated[str, Meta(pattern=r"^((2[0-4]|[01]?[0-9])-(2[0-4]|[01]?[0-9]))?\Z")] = ""
    delay_h: Annotated[float, Meta(ge=0, le=8760)] = 0.0
    confirm_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    trial_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0


class DeviceConfig(SharedSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of one device. With `remote_settings` off the operator changes none of them.

    `data` is a source of `edge_fl_devices.data.sources`; `tier` limits the measured tier; `root` is the release root installed
    with the device. With `uploads` off a head-only device sends metrics only: neither the head updates (class means, ...) of a method nor
    class statistics.
    `head` "auto" selects the kind with the best validation accuracy within `head_budget_s`. `balanced` weights all classes equally. With
    `guard` a new model that is worse on held-out samples does not replace the served one.
    `classes` limits data and predictions to these classes (empty: all; "own": predictions to those with own labels), `keep` the data to
    this many files of a folder, or samples of other sources (0: all), selected by `policy`. Every `watch_s` seconds the device looks for
    new samples (0: never); while they keep coming, the pauses between fits grow to `refit_every_s`.
    `epsilon` limits the total privacy loss of its updates at delta 1e-5, whatever a run allows (0: the run's limit).
    `precision` "auto" selects the int8 extractor where float32 needs too much memory or more than `latency_ms` per sample.
    With fewer than `cross_validate_below` samples in a folder the head is fitted on all of them, and its accuracy is cross-validated.
    A sample is answered if the set of classes that has the right one for a share `promise` of all samples is a single class (0: always),
    and unless it is further from the labelled samples than all but a share of `false_alarm` of these (0: none).
    `bits` is how many 16-bit pictures use; "auto" finds it out from a sample of them.
    In secure sums the device takes part only with the protection of `sums` or more (`edge_fl.secure.floors`).
    With `remote_logs` off the device answers no query for its log or a diagnostics bundle.
    `mirror` is the address of an exported repository, http(s):// or file://, from which releases are taken first; missing parts come
    from the broker.
    """

    id: Name
    data: str
    tier: Literal["auto", "head", "full"] = "auto"
    folder: str = FOLDER
    root: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    guard: bool = True
    threads: Annotated[int, Meta(ge=1)] = 1
    uploads: bool = True
    remote_logs: bool = True
    remote_settings: bool = True
    epsilon: Annotated[float, Meta(ge=0)] = 0.0
    capture: CaptureConfig = CaptureConfig()
    precision: Literal["auto", "fp32", "int8"] = "auto"
    latency_ms: Annotated[float, Meta(gt=0)] = 250.0
    bits: Literal["auto", 8, 10, 12, 14, 16] = "auto"
    cross_validate_below: Annotated[int, Meta(ge=0)] = 300
    mirror: Annotated[str, Meta(pattern=r"^((https?://|file:///)[^\s?#]+)?\Z")] = ""
    broker: DeviceBroker = DeviceBroker()
    update: UpdateConfig = UpdateConfig()
    sums: SumFloors = SumFloors()

    @property
    def reads_folder(self) -> bool:
        """Whether the data are a folder, whose samples have no split of their own."""
        kind, colon, _ = self.data.partition(":")
        return kind == "folder" if colon else self.data[-4:] not in SINGLE_FILES


def with_certificate_name(tree: dict[str, object], where: str) -> dict[str, object]:
    """Set `id` to the name on the device's certificate, if it has one. Raises ConfigError when the settings contain another name."""
    broker = tree.get("broker")
    folder = broker.get("identity") if isinstance(broker, dict) else None
    if not folder or not isinstance(folder, str):
        return tree
    from edge_fl.wire import identity  # as above

    if (certificate := identity.certificate_in(folder)) is None:
        return tree
    name = certificate.device
    if tree.get("id", name) != name:
        raise ConfigError(
            f"{where}: id = {tree['id']!r}, but the identity in {folder} is that of {name!r}; expected one name"
        )
    return {**tree, "id": name}


def convert(tree: dict[str, object], where: str) -> DeviceConfig:
    """Check the settings. Raises ConfigError, with the nearest known key for a mistyped one."""
    config = toml.checked(tree, DeviceConfig, where)
    auto.require_kinds([config.head], where)
    identity = config.broker.identity
    for key, path in (
        ("data", config.data),
        ("folder", config.folder),
        ("root", config.root),
        ("identity", identity),
    ):
        if path and not is_utf8(Path(path).absolute()):  # settings are sent to children and stored
            raise ConfigError(
                f"{where}: {key} = '{text(path)}' in '{text(Path.cwd())}': the name is not UTF-8; expected one that is,"
                f" such as that of a link to it (ln -s)"
            )
    return config


def remember(config: DeviceConfig) -> None:
    """Store the settings in the device's folder, for `edge-fl device serve`. Raises OSError."""
    data, broker = config.data, config.broker
    if config.reads_folder:
        data = f"folder:{text(Path(data.removeprefix('folder:')).absolute())}"
    if broker.identity:
        broker = msgspec.structs.replace(broker, identity=os.fspath(Path(broker.identity).absolute()))
    stored = msgspec.json.encode(msgspec.structs.replace(config, data=data, broker=broker))
    path = Path(config.folder) / SETTINGS
    if not path.exists() or path.read_bytes() != stored:
        atomic.write(path, stored, private=True)


def remembered(folder: Path) -> DeviceConfig | None:
    """Return the settings with which the agent last ran in a folder, or None."""
    found = read_json(folder / SETTINGS, DeviceConfig)
    return msgspec.structs.replace(found, folder=os.fspath(folder)) if found else None


def read_root(path: Path) -> bytes:
    """Read the root of trust for releases. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{text(path)}: {error.strerror}; expected the root of signed releases") from error


def from_options(file: Path, options: Mapping[str, object]) -> DeviceConfig:
    """Read `file` and replace its settings by the options that are not None. Raises ConfigError."""
    return convert(*read_tree(file, options, {}))


def read_tree(
    file: Path | None,
    options: Mapping[str, object],
    connection: Mapping[str, object],
    before: DeviceConfig | None = None,
) -> tuple[dict[str, object], str]:
    """Like `from_options`: the settings before they are checked, and where they come from; `before` stands for a file."""
    tree = toml.read(file) if file else msgspec.to_builtins(before) if before else {}
    given = {name: value for name, value in options.items() if value is not None}
    tree |= {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    if connection:
        broker = tree.get("broker")
        tree["broker"] = {**(broker if isinstance(broker, dict) else {}), **connection}
    if before and not file:
        where = text(Path(before.folder) / SETTINGS)
    else:
        where = text(file) if file else "options"
    return with_certificate_name(tree, where), where
