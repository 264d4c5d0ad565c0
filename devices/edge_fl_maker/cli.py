"""The makers' commands `edge-fl device ...`: predict over HTTP and from a camera, export, label, share, back up and reset."""

import sys
from pathlib import Path
from typing import Annotated

from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import print_status
from edge_fl.files.paths import text
from edge_fl.options import CONNECTION, ConnectionOptions, argument, option
from edge_fl_devices.options import DEVICE_FOLDER, ConfigOption, ExistingFolder, IdOption, PredictionOptions
from edge_fl_devices.serving.show import print_threshold
from edge_fl_maker.upkeep.cli import backup, label, reset, restore, share, uninstall


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
    folder: ExistingFolder = DEVICE_FOLDER,
    config: Annotated[
        Path | None, option("--config FILE", "The device's settings [those of the last device run].")
    ] = None,
    host: Annotated[
        str,
        option(
            "--host HOST", "Address to listen on; 0.0.0.0 for all: then clients need the token.", CONNECTION
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, option("--port N", "Port; 0 selects a free one.", CONNECTION, min=0, max=65535)
    ] = 8000,
    *,
    answers: PredictionOptions,
) -> None:
    """Predict over HTTP (POST a picture to /predict), and label pictures in a browser (/label)."""
    from edge_fl_devices.board.memory import return_freed_blocks

    return_freed_blocks()
    from edge_fl_devices import config as settings
    from edge_fl_devices.board.installation import settings_file
    from edge_fl_maker.labelling.serve import serving

    known = None if config else settings.remembered(folder)
    if known is None and (file := config or settings_file()):
        known = settings.from_options(file, {"folder": folder})
    with serving(folder, known, host, port, answers.values) as service:
        service.run()


def watch(
    camera: Annotated[
        str, option("--camera CAMERA", "Number of a camera, an rtsp:// or http:// address, or a video file.")
    ] = "0",
    folder: ExistingFolder = DEVICE_FOLDER,
    interval: Annotated[
        float, option("--interval SECONDS", "Shortest time between predictions, in seconds.", min=0)
    ] = 0.0,
    count: Annotated[int, option("--count N", "Number of predictions; 0: until Ctrl-C.", min=0)] = 0,
    publish: Annotated[
        bool, option("--publish", "Also publish over MQTT, with Home Assistant discovery.")
    ] = False,
    config: ConfigOption = None,
    id: IdOption = None,
    *,
    answers: PredictionOptions,
    connection: ConnectionOptions,
) -> None:
    """Predict the newest frame of a camera, again and again: one JSON object per line."""
    from contextlib import ExitStack

    import msgspec

    from edge_fl_maker.capture.camera import Camera
    from edge_fl_maker.current_model import CurrentModel
    from edge_fl_maker.watch import watch as predictions

    with ExitStack() as stack:
        model = CurrentModel(folder, **answers.values)
        print_threshold(model.current())
        publisher = None
        if publish:
            from edge_fl_maker import home_assistant

            publisher = stack.enter_context(home_assistant.connected(config, id, connection.given()))
        frames = stack.enter_context(Camera(camera))
        for found in predictions(model, frames, interval_s=interval, count=count):
            sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
            sys.stdout.flush()
            if publisher:
                publisher.publish(found)
