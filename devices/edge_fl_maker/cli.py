"""The makers' commands `edge-fl device ...`: predict over HTTP and from a camera, export, label, share, back up, reset and uninstall."""

from __future__ import annotations

import os
import sys
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from edge_fl import signals
from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import confirm, print_status
from edge_fl.errors import InputError
from edge_fl.files import user_text
from edge_fl.files.paths import text
from edge_fl.files.user_text import EncodingError
from edge_fl.options import CONNECTION, FOLDERS, ConnectionOptions, YesOption, argument, option
from edge_fl_devices.board.installation import ACCOUNT, settings_file
from edge_fl_devices.options import (
    DEVICE_FOLDER,
    ConfigOption,
    ExistingFolder,
    FolderOrThatOfSettings,
    IdOption,
    PredictionOptions,
)
from edge_fl_devices.serving.show import print_promise

if TYPE_CHECKING:
    from edge_fl_devices.config import DeviceConfig

PassphraseOption = Annotated[
    str,
    option(
        "--passphrase-file FILE",
        "File with the passphrase that encrypts the backup; - asks for it on the terminal.",
    ),
]
StreamOption = Annotated[
    str, option("--stream SOURCE", "No camera: mqtt://HOST/TOPIC, alsa:DEVICE or python:module:function.")
]
LEAST_PASSPHRASE = 8


def register(app: App) -> None:
    """Add the makers' commands to the group `device`."""
    device = app.group("device")
    device.add(serve, "edge-fl device serve --port 8000")
    device.add(watch, "edge-fl device watch --camera 0 --interval 1")
    device.add(export, "edge-fl device export model.onnx")
    device.add(label, "edge-fl device label on")
    device.add(share, "edge-fl device share")
    device.add(reset, "edge-fl device reset --dir /var/lib/edge-fl")
    device.add(backup, "edge-fl device backup pi-07.backup --passphrase-file secret")
    device.add(restore, "edge-fl device restore pi-07.backup --passphrase-file secret")
    device.add(uninstall, "edge-fl device uninstall")


def export(
    file: Annotated[Path, argument("FILE", "New file for the model.")],
    folder: ExistingFolder = DEVICE_FOLDER,
) -> None:
    """Write extractor and personal head of this device as one ONNX model; needs the package onnx."""
    from edge_fl_devices.serving.predict import Predictor
    from edge_fl_maker import fused

    size = fused.export(Predictor(folder), file)
    print_status(f"{text(file)}: {units.size(size)}; its predictions match the served model")


def serve(
    folder: FolderOrThatOfSettings = None,
    config: Annotated[
        Path | None,
        option("--config FILE", "TOML file with the device's settings [those of the last device run]."),
    ] = None,
    host: Annotated[
        str,
        option(
            "--listen HOST", "Address to listen on; 0.0.0.0 for all: then clients need the token.", CONNECTION
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, option("--port N", "Port to listen on; 0 selects a free one.", CONNECTION, min=0, max=65535)
    ] = 8000,
    stream: StreamOption = "",
    *,
    answers: PredictionOptions,
) -> None:
    """Predict over HTTP (POST a picture to /predict), and label pictures in a browser (/label)."""
    from edge_fl.process_limits import return_freed_blocks

    return_freed_blocks()
    import msgspec

    from edge_fl_devices import config as settings
    from edge_fl_maker.labelling.serve import serving

    known = None if config else settings.remembered(folder or DEVICE_FOLDER)
    if known is None and (file := config or settings_file()):
        known = settings.from_options(file, {"folder": folder})
    if known and stream:
        tree = msgspec.to_builtins(known)
        tree["capture"] |= {"source": stream, "crop": ""}
        known = settings.convert(tree, "--stream")
    place = Path(known.folder) if known else folder or DEVICE_FOLDER
    with signals.serving(print_status), serving(place, known, host, port, answers.values) as service:
        service.run()


def watch(
    camera: Annotated[
        str, option("--camera CAMERA", "Number of a camera, an rtsp:// or http:// address, or a video file.")
    ] = "0",
    stream: StreamOption = "",
    crop: Annotated[
        str,
        option(
            "--crop REGION",
            "Use only this part of a frame: x,y,w,h in pixels [that of [capture] for this camera].",
        ),
    ] = "",
    folder: FolderOrThatOfSettings = None,
    interval: Annotated[
        float, option("--interval SECONDS", "Shortest time between predictions, in seconds.", min=0)
    ] = 0.0,
    limit: Annotated[
        int | None, option("--limit N", "Number of predictions after which it ends [until Ctrl-C].", min=1)
    ] = None,
    consensus: Annotated[
        str, option("--consensus VOTES", "Report a state once K of the last N predictions agree: K/N [each].")
    ] = "",
    lasting: Annotated[
        str, option("--for DURATION", "For how long, such as 10s or 2min; most must agree until then.")
    ] = "0s",
    publish: Annotated[
        bool, option("--publish", "Also publish over MQTT, with Home Assistant discovery.")
    ] = False,
    config: ConfigOption = None,
    id: IdOption = None,
    *,
    answers: PredictionOptions,
    connection: ConnectionOptions,
) -> None:
    """Predict the newest frame of a camera, or each window of a stream: one JSON object per line, and how often the class changes."""
    from contextlib import ExitStack, closing, nullcontext

    import msgspec

    from edge_fl_devices import config as settings
    from edge_fl_maker.capture.camera import NOTHING, Camera
    from edge_fl_maker.capture.streams import Stream
    from edge_fl_maker.consensus import Consensus
    from edge_fl_maker.current_model import CurrentModel
    from edge_fl_maker.watch import summary
    from edge_fl_maker.watch import watch as predictions

    if crop and stream:
        raise InputError(f"--crop {crop}: only frames of a camera can be cropped; expected --camera", NOTHING)
    for_s = units.parse_duration(lasting, "--for")
    if for_s and not consensus:
        raise InputError(f"--for {lasting}: expected --consensus K/N, such as 3/5, with it", NOTHING)
    agreed = Consensus(consensus, for_s) if consensus else None
    own = settings.from_options(config, {}) if config else None
    folder = folder or (Path(own.folder) if own else DEVICE_FOLDER)
    with nullcontext() if limit else signals.serving(print_status), ExitStack() as stack:
        model = CurrentModel(folder, **answers.values)
        print_promise(model.current())
        publisher = None
        if publish:
            from edge_fl_maker import home_assistant

            publisher = home_assistant.connected(config, id, connection.given(), folder)
            stack.enter_context(closing(publisher))
        if stream:
            source: Camera | Stream = Stream(stream, model.current().manifest.input)
        else:
            source = Camera(camera, crop=_crop(crop, camera, own or settings.remembered(folder)))
        stack.enter_context(closing(source))
        last = None
        try:
            for last in predictions(model, source, interval_s=interval, count=limit or 0, consensus=agreed):
                sys.stdout.write(msgspec.json.encode(last).decode() + "\n")
                sys.stdout.flush()
                if publisher:
                    publisher.publish(last)
        finally:
            if last:
                print_status(summary(last, agreed=bool(agreed)))


def _crop(given: str, camera: str, known: DeviceConfig | None) -> str:
    """The region of the frames to predict: if none is given, that of the captured pictures of this camera. It is said if they differ."""
    from edge_fl_maker.capture.camera import shown

    captured, name = known.capture if known else None, shown(camera)
    if captured is None or captured.source.removeprefix("camera:") != camera or given == captured.crop:
        return given
    if not given:
        print_status(f"camera {name}: cropped to {captured.crop}, as the pictures of [capture]")
        return captured.crop
    cropped = f"cropped to {captured.crop}" if captured.crop else "not cropped"
    print_status(
        f"camera {name}: --crop {given}, but the pictures of [capture] are {cropped}: the head learns from another part of the frame"
    )
    return given


def label(
    switch: Annotated[
        Literal["on", "off"] | None, argument("on|off", "Start or stop the page, now and at every boot.")
    ] = None,
    folder: ExistingFolder = DEVICE_FOLDER,
) -> None:
    """Switch the label page of a flashed board on or off, a service under the agent's account, and show its address with the token."""
    from edge_fl_maker.upkeep import label_page

    label_page.require_installed()
    settings = _settings(folder)
    if switch:
        label_page.switch(on=switch == "on")
    if not label_page.is_on():
        print_status("the label page is off; 'sudo edge-fl device label on' starts it")
        return
    for address in label_page.addresses(folder, settings):
        print(address)
    print_status("the label page is on, for each person in this network who has one of these addresses")


def share(
    group: Annotated[
        str, option("--group GROUP", "Group of the agent's account, whose members share the pictures.")
    ] = ACCOUNT,
    folder: ExistingFolder = DEVICE_FOLDER,
) -> None:
    """Share the pictures of this device: the agent and all members of its group can add, label and delete them."""
    from edge_fl.files import shared
    from edge_fl_devices.data import location

    settings = _settings(folder)
    if not settings.reads_folder:
        raise InputError(f"data {settings.data}: no folder of pictures to share")
    data = Path(location.parsed(settings.data)[1])
    try:
        shared.share(data, group)
    except KeyError as error:
        raise InputError(
            f"group {group!r}: does not exist; expected one of this machine (--group)"
        ) from error
    except OSError as error:
        raise InputError(f"{text(error.filename or data)}: {error.strerror}; expected sudo") from error
    print_status(f"{text(data)}: shared with the group {group}; 'sudo usermod -aG {group} USER' adds a user")


def _settings(folder: Path) -> DeviceConfig:
    """The settings of the last run, or those that the board was flashed with. Raises InputError."""
    from edge_fl_devices import config

    if found := config.remembered(folder):
        return found
    if file := settings_file():
        return config.from_options(file, {"folder": folder})
    raise InputError(
        f"{text(folder)}: no settings of a last run, expected the folder of a device that has run (--dir)"
    )


def reset(
    folder: ExistingFolder = DEVICE_FOLDER,
    labels: Annotated[
        bool,
        option("--delete-labels", "Also delete the pictures, those with labels in the data folder included."),
    ] = False,
    identity: Annotated[
        bool,
        option(
            "--delete-identity",
            "Also delete certificate and key, trusted metadata, and the record of epsilon spent.",
        ),
    ] = False,
    trust: Annotated[
        bool,
        option(
            "--trust",
            "For a fleet with a new server: delete the trusted keys, settings from the operator and unsent reports; heads and labels stay.",
        ),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Reset the device to its state after flashing: heads, outbox, releases and caches are deleted; labels stay unless you say so."""
    from edge_fl_maker.upkeep import device_folder
    from edge_fl_maker.upkeep.device_folder import stopped

    if trust and (labels or identity):
        raise InputError(
            "--trust: with --delete-labels or --delete-identity; expected it alone, or a reset without it"
        )
    with stopped(folder):
        planned = (
            device_folder.plan_trust_reset(folder)
            if trust
            else device_folder.plan_reset(folder, labels=labels, identity=identity)
        )
    if not planned.paths:
        print_status(f"{text(folder)}: nothing to delete")
        return
    confirm(f"Delete {planned.describe()}?", yes)
    device_folder.reset(folder, planned)
    if trust:
        device_folder.forget_server(folder)
        _say_whom_to_trust(folder, planned.settings)
        return
    ledgers = ["identity", "privacy budget", "trusted metadata", "settings from the operator"]
    kept = [*([] if identity else ledgers), *([] if labels else ["pictures and their labels"])]
    print_status(f"{text(folder)}: reset{'; kept: ' if kept else ''}{', '.join(kept)}")
    if not identity:
        print_status(
            "the agent fetches its release again when it next meets the broker, and serves nothing until then"
        )


def _say_whom_to_trust(folder: Path, settings: DeviceConfig | None) -> None:
    """Say whose keys the device trusts from now on."""
    print_status(f"{text(folder)}: kept: heads, labels, releases, identity, privacy budget")
    if settings and settings.root:
        print_status(
            f"its settings name the root {settings.root}: put the new server's metadata/N.root.json there"
        )
    else:
        print_status("the agent trusts the first server that it meets at the broker of its settings")


def backup(
    file: Annotated[Path, argument("FILE", "New file for the backup.")],
    passphrase_file: PassphraseOption = "",
    folder: ExistingFolder = DEVICE_FOLDER,
) -> None:
    """Back up heads, settings, personal parts, privacy budget and identity of this device into one file of mode 0600."""
    from edge_fl_devices.config import remembered
    from edge_fl_maker.upkeep import backups
    from edge_fl_maker.upkeep.device_folder import stopped

    with stopped(folder):
        settings = remembered(folder)
    if settings is None:
        raise InputError(
            f"{text(folder)}: no settings of a last run, expected the folder of a device that has run (--dir)"
        )
    size = backups.back_up(folder, settings, file, _passphrase(passphrase_file, new=True))
    protection = "encrypted" if passphrase_file else "not encrypted: it contains the device's key"
    print_status(f"{text(file)}: backup of {settings.id}, {units.size(size)}, {protection}")


def restore(
    file: Annotated[Path, argument("FILE", "A backup of 'edge-fl device backup'.")],
    passphrase_file: PassphraseOption = "",
    folder: ExistingFolder = DEVICE_FOLDER,
    identity: Annotated[
        Path | None,
        option(
            "--identity FOLDER",
            "Identity folder: where to restore it [that of the settings in the backup].",
            FOLDERS,
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Restore a backup of this device, for example on a new card; the old card must not run any more."""
    import msgspec

    from edge_fl.untrusted import NOT_JSON
    from edge_fl_devices.config import DeviceConfig
    from edge_fl_maker.upkeep import backups

    header, contents = backups.read(file, _passphrase(passphrase_file))
    try:
        settings = msgspec.json.decode(contents.get("settings.json", b""), type=DeviceConfig)
    except NOT_JSON as error:
        raise InputError(f"{text(file)}: settings that this version cannot read ({error})") from error
    where = identity or (Path(settings.broker.identity) if settings.broker.identity else None)
    existing = [text(path) for path in (folder, where) if path and path.is_dir() and any(path.iterdir())]
    if existing:
        confirm(f"Replace what {header.device}'s backup contains in {' and '.join(existing)}?", yes)
    try:
        backups.restore(contents, folder, where)
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; expected folders to write to (sudo)"
        ) from error
    into = f" and its identity to {text(where)}" if where else ""
    print_status(
        f"{header.device}: restored to {text(folder)}{into}; two devices with one identity are quarantined"
    )


def uninstall(yes: YesOption = False) -> None:
    """Remove edge-fl from this board: service, program, settings, identity and the agent's folder; your pictures stay."""
    from edge_fl_maker.upkeep import uninstalling

    paths = uninstalling.installed()
    if not paths:
        raise InputError("nothing of 'edge-fl flash' is installed here")
    if os.geteuid() != 0:
        raise InputError("device uninstall: not root, expected sudo")
    confirm(f"Delete {', '.join(map(text, paths))}, with identity, heads and unlabelled pictures?", yes)
    try:
        uninstalling.uninstall(paths)
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}", "run the command again to complete it"
        ) from error
    print_status("edge-fl was removed; pictures, and the bundle on the boot partition, stay")
    if left := uninstalling.left_by_dependencies():
        print_status(
            f"onnxruntime wrote {', '.join(map(text, left))}: delete it if no other program uses onnxruntime"
        )


def _passphrase(file: str, *, new: bool = False) -> str:
    """Read a passphrase. Raises InputError."""
    if not file:
        return ""
    try:
        if file == "-":
            if not sys.stdin.isatty():
                raise InputError("--passphrase-file -: no terminal to ask on, expected a file")
            found = getpass("Passphrase: ")
            if new and getpass("Again: ") != found:
                raise InputError("the passphrases differ")
        else:
            found = user_text.read(Path(file)).strip()
    except (OSError, EncodingError) as error:
        raise InputError(f"--passphrase-file {file}: {error}") from error
    if len(found) < LEAST_PASSPHRASE:
        raise InputError(
            f"--passphrase-file {file}: {len(found)} characters, expected {LEAST_PASSPHRASE} or more"
        )
    return found
