"""`edge-fl demo`: broker, server and simulated devices on this machine."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from edge_fl.console.output import print_status, show_table, show_text
from edge_fl.files.paths import text
from edge_fl_server.cli.options import RUNS, RunsOption


def demo(
    dataset: Annotated[
        str,
        typer.Option(
            metavar="DATASET", rich_help_panel="Data", help="A dataset by name; digits needs no file."
        ),
    ] = "digits",
    data_dir: Annotated[
        Path,
        typer.Option(metavar="FOLDER", rich_help_panel="Data", help="Folder of the datasets' .npz files."),
    ] = Path(".data"),
    devices: Annotated[int, typer.Option(metavar="N", min=2, help="Number of simulated devices.")] = 12,
    full: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many of them train; the others fit heads.")
    ] = 4,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel="Training", min=1, help="Communication rounds [the recipe's]."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel="Connection",
            min=1,
            max=65535,
            help="The broker's port [a free one].",
        ),
    ] = None,
    runs: RunsOption = RUNS,
    keep: Annotated[
        bool, typer.Option("--keep", help="Also keep the folders of the devices and the broker.")
    ] = False,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="Use mTLS: the broker, the server and each device get a certificate."),
    ] = False,
    compare_plaintext: Annotated[
        bool,
        typer.Option(
            "--compare-plaintext",
            help="With --secure: run the demo in plaintext first, and print the ratio of the durations.",
        ),
    ] = False,
) -> None:
    """Run a broker, a server and simulated devices that learn together on this machine; takes about half a minute."""
    from dataclasses import replace

    from edge_fl_lab import demo as demos

    options = demos.DemoOptions(dataset, data_dir, devices, full, rounds, port, runs, keep, secure)
    plaintext_s = demos.run(replace(options, secure=False)).seconds if compare_plaintext else None
    result = demos.run(options)
    print(result.histogram, end="\n\n")
    show_table(result.devices, demos.DEVICE_COLUMNS)
    print()
    show_table(result.comparison, demos.COMPARISON_COLUMNS)
    show_text(f"\n{result.note}")
    duration = f"Duration: {result.seconds:.1f} s" + (" over mTLS" if secure else "")
    if plaintext_s is not None:
        duration += f", {plaintext_s:.1f} s in plaintext (ratio {result.seconds / plaintext_s:.2f})"
    print(f"{duration}\nResults: {result.path}\n")
    show_text(result.verdict)
    dashboard = [_program(), "server", "dashboard", "--database", str(result.path / demos.REGISTRY)]
    print_status(f"next: {shlex.join(dashboard)}")


def _program() -> str:
    """How to call edge-fl from here: by name, or by its path where it is not on PATH, as after `make demo`."""
    here = Path(sys.executable).with_name("edge-fl")
    if shutil.which("edge-fl") or not here.exists():
        return "edge-fl"
    return text(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)
