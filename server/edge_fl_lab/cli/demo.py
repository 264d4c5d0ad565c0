"""`edge-fl demo`: broker, server and simulated devices on this machine."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

from edge_fl.console.output import print_status, show_table, show_text
from edge_fl.files.paths import text
from edge_fl.options import CONNECTION, DATA, DATA_DIR, TRAINING, option
from edge_fl_server.cli.options import RUNS, RunsOption, SetOption


def demo(
    dataset: Annotated[
        str, option("--dataset DATASET", "Dataset, by name; digits needs no file.", DATA)
    ] = "digits",
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"),
    devices: Annotated[int, option("--devices N", "Number of simulated devices.", min=2)] = 28,
    full: Annotated[
        int, option("--full N", "Number of full devices, which train; the others fit heads.", min=1)
    ] = 4,
    rounds: Annotated[
        int | None, option("--rounds N", "Communication rounds [the recipe's].", TRAINING, min=1)
    ] = None,
    settings: SetOption = None,
    histogram: Annotated[bool, option("--histogram", "Also print the images per device and class.")] = False,
    port: Annotated[
        int | None, option("--port N", "Port of the broker [a free one].", CONNECTION, min=1, max=65535)
    ] = None,
    runs: RunsOption = RUNS,
    keep: Annotated[bool, option("--keep", "Also keep the folders of the devices and the broker.")] = False,
    secure: Annotated[
        bool, option("--secure", "Use mTLS: the broker, the server and each device get a certificate.")
    ] = False,
    compare_plaintext: Annotated[
        bool,
        option(
            "--compare-plaintext",
            "With --secure: run the demo in plaintext first, and print the ratio of the durations.",
        ),
    ] = False,
) -> None:
    """Run a broker, a server and simulated devices on this machine, and show what a device gains; takes under a minute."""
    from dataclasses import replace

    from edge_fl_lab import demo as demos
    from edge_fl_lab.demo_data import COLUMNS

    options = demos.DemoOptions(
        dataset, data_dir, devices, full, rounds, tuple(settings or ()), port, runs, keep, secure
    )
    plaintext_s = demos.run(replace(options, secure=False)).seconds if compare_plaintext else None
    result = demos.run(options)
    if histogram:
        print(result.histogram, end="\n\n")
    print()
    show_table(result.figures.rows, COLUMNS)
    duration = f"Duration: {result.seconds:.1f} s" + (" over mTLS" if secure else "")
    if plaintext_s is not None:
        duration += f", {plaintext_s:.1f} s in plaintext (ratio {result.seconds / plaintext_s:.2f})"
    show_text(f"\n{result.figures.sentence()}")
    print(duration, flush=True)
    dashboard = [_program(), "server", "dashboard", "--database", str(result.path / demos.REGISTRY)]
    print_status(f"next, this fleet in a browser:\n  {shlex.join(dashboard)}")
    print_status(
        f"or a model of your own pictures, in one folder per class:\n  {_program()} new pets --images FOLDER"
    )


def _program() -> str:
    """How to call edge-fl from here: by name, or by its path where it is not on PATH, as after `make demo`."""
    here = Path(sys.executable).with_name("edge-fl")
    if shutil.which("edge-fl") or not here.exists():
        return "edge-fl"
    return text(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)
