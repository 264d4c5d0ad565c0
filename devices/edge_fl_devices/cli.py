"""The commands `edge-fl device ...`; registers `fleet up` (`simulated.cli`) and `flash` (`flash.cli`) as well."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns, cell_text
from edge_fl.errors import InputError, RunError, shortened
from edge_fl.files.paths import text
from edge_fl.options import FormatOption, argument, option
from edge_fl_devices.flash.cli import flash
from edge_fl_devices.options import (
    DEVICE_FOLDER,
    AgentOptions,
    DeviceOptions,
    ExistingFolder,
    PredictionOptions,
    full_worker,
    log_warnings,
    stop_on_signal,
)
from edge_fl_devices.serving.show import PredictionFormat, print_model, print_promise, show_predictions
from edge_fl_devices.simulated.cli import up

if TYPE_CHECKING:
    from edge_fl_devices.child import Children
    from edge_fl_devices.config import DeviceConfig
    from edge_fl_devices.doctor import DeviceCheck
    from edge_fl_devices.remote.applied_settings import RemoteSettings
    from edge_fl_devices.serving.predict import Prediction

MAX_NAMED = 10
PROGRESS_S = 10.0


def register(app: App) -> None:
    """Add the group `device`, `fleet up` and `flash`."""
    device = app.group("device", "One device: run its agent, predict, show its status.", "Device")
    device.add(run, "edge-fl device run --id pi-07 --host laptop.local --data pictures")
    device.add(predict, "edge-fl device predict photo.jpg --top 3")
    device.add(status, "edge-fl device status")
    device.add(
        doctor,
        "edge-fl device doctor\nedge-fl device doctor --labels\n"
        "edge-fl device doctor --id pi-07 --host laptop.local --data pictures",
    )
    fleet = app.group("fleet", "Many devices: simulate, list, enrol and revoke them.", "Fleet")
    fleet.add(up, "edge-fl fleet up --head-only 8 --full 4 --until-idle")
    app.root.add(
        flash, "edge-fl flash --id pi-07 --boot /media/me/bootfs --host laptop.local", panel="Device"
    )


def run(device: DeviceOptions, agent: AgentOptions) -> None:
    """Run the agent of one device until Ctrl-C. It waits for the broker without a time limit."""
    import os

    from edge_fl_devices.child import feature_children

    if os.geteuid() == 0:
        _become_owner(device)
    with closing(feature_children()) as children:
        children.start()  # the child loads its modules while the agent does
        from edge_fl_devices.remote.applied_settings import RemoteSettings

        settings = RemoteSettings(*device.tree(**asdict(agent)))
        code = _run(settings, children)
    raise typer.Exit(code)


def _become_owner(device: DeviceOptions) -> None:
    """As root, run as the account that owns the device's folder, so that all that the agent writes belongs to it."""
    from edge_fl.files.shared import become_owner
    from edge_fl_devices.config import FOLDER

    tree, _ = device.tree()
    folder = Path(str(tree.get("folder") or FOLDER))
    if name := become_owner(folder):
        print_status(f"running as {name}, the owner of {text(folder)}")


def _run(settings: RemoteSettings, children: Children) -> int:
    """Run the agent, again with other settings whenever the operator changes them."""
    from edge_fl.console.progress import Progress
    from edge_fl_devices.runtime.connection import device_connector
    from edge_fl_devices.runtime.run_device import run_device
    from edge_fl_devices.runtime.runner import Notifier, Runner

    log_warnings()
    before, notifier = None, Notifier()
    with Progress() as progress:
        while True:
            connect, tick = device_connector(settings.config, print_status)
            runner = Runner(notifier=notifier, end_work=children.end)
            stop_on_signal(runner)
            if before and before.stopped:  # by a signal during the restart
                return 0
            try:
                code = run_device(settings, connect, runner, children, full_worker, progress, tick)
                if runner.how:
                    print_status(f"{settings.config.id}: disconnected, {runner.how}")
                if not runner.continues:
                    return code
                settings.begin()
            except InputError as error:
                if not settings.revert(error):
                    raise
                print_status(f"{error.message}; the settings before stay")
            before = runner


def predict(
    source: Annotated[
        str, argument("FILES", "A picture or recording, a folder of them, an .npz, or - for a file on stdin.")
    ],
    folder: ExistingFolder = DEVICE_FOLDER,
    *,
    answers: PredictionOptions,
    format: Annotated[
        PredictionFormat,
        option("--format table|json|csv", "Output format: table for reading, JSON or CSV for scripts."),
    ] = PredictionFormat.TABLE,
) -> None:
    """Predict with the extractor and personal head of this device; needs no broker. Exit code 1 if files were skipped."""
    from edge_fl_devices.serving.predict import MAX_FILE_BYTES, Predictor

    skipped: list[str] = []
    predictor = Predictor(folder, remember=True, **answers.values)
    if source == "-":
        found = predictor.read_file("-", sys.stdin.buffer.read(MAX_FILE_BYTES))
    else:
        reading = predictor.read(
            Path(source), lambda path, reason: skipped.append(f"{text(path)} ({reason})"), print_status
        )
        found = list(_with_progress(reading))
    print_model(predictor)
    print_promise(predictor, found)
    show_predictions(found, format)
    if skipped:
        sys.stdout.flush()
        raise RunError(
            f"{len(skipped)} skipped: {shortened(skipped, MAX_NAMED)}",
            consequence="all other files were predicted",
        )


def _with_progress(reading: Iterator[Prediction]) -> Iterator[Prediction]:
    """Yield the predictions, with a line on stderr every PROGRESS_S that says how many there are."""
    said_s = time.monotonic()
    for number, each in enumerate(reading, 1):
        yield each
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print_status(f"{number:,} samples predicted so far")


def doctor(
    device: DeviceOptions,
    labels: Annotated[
        bool, option("--labels", "Only examine the labels: probably wrong ones, near duplicates, few labels.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check this device for problems and show what to do about them; exit code 1 if a check failed.

    Without a file its settings are those that the board was flashed with, or with which its agent last ran.
    """
    from edge_fl_devices.doctor import run_checks
    from edge_fl_devices.remote.applied_settings import RemoteSettings

    settings = RemoteSettings(*device.of_agent())
    results = list(_label_checks(settings.config)) if labels else run_checks(settings.config, print_status)
    columns: Columns = {
        "check": "check",
        "state": "state",
        "found": Column("found", prose=True),
        "remedy": Column("remedy", prose=True),
    }
    show_table([asdict(result) for result in results], columns, format)
    sys.stdout.flush()
    if failed := [result.check for result in results if result.state == "failed"]:
        raise RunError(f"{', '.join(failed)}: failed; the table lists the remedies")


def _label_checks(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """A result for each label to look at and each remark on a class, and one for all labels."""
    from edge_fl.errors import EdgeFLError, NoLabelsError
    from edge_fl_devices.doctor import DeviceCheck
    from edge_fl_devices.workers import label_examination

    print_status("examining labels")
    try:
        found, names, classes = label_examination.of_device(config)
    except (EdgeFLError, OSError, MemoryError) as error:
        waits = isinstance(error, NoLabelsError | label_examination.NoReleaseError)
        remedy = (
            "label some on the label page"
            if waits
            else "edge-fl device doctor, which checks data and release"
        )
        yield DeviceCheck("labels", "skipped" if waits else "failed", str(error), remedy)
        return
    for each in found.labels:
        likely = classes[each.likely]
        remedy = (
            f"look at it; if it is {likely}, move it to the folder {likely};"
            " if not, say on the label page that it is right, and it is not listed again"
        )
        yield DeviceCheck("label", "warning", f"{names[each.file]}: rather {likely}: {each.why}", remedy)
    for remark in found.remarks:
        yield DeviceCheck("class", "warning", remark, "see docs/teach-a-device.md, section Labels to look at")
    state: Literal["ok", "warning"] = "warning" if found.labels else "ok"
    yield DeviceCheck("labels", state, found.words, "look at those above" if found.labels else "")


def status(folder: ExistingFolder = DEVICE_FOLDER, format: FormatOption = Format.TABLE) -> None:
    """Show the state of this device: served release, head, pending reports."""
    from edge_fl_devices.doctor.status import read

    show_table(read(folder), {"what": "what", "value": Column("value", _status_value, prose=True)}, format)


def _status_value(value: object) -> str:
    return units.percent(value) if isinstance(value, float) else cell_text(value)
