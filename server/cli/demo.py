"""`edge-fl demo`: broker, server and simulated devices on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_fl.console.output import show_table
from server.cli.connection import interrupt_on_sigterm
from server.cli.options import (
    RunsOption,
)


def demo(
    dataset: Annotated[str, typer.Option(help="A dataset by name; digits needs no file.")] = "digits",
    data_dir: Annotated[Path, typer.Option(help="Where datasets are.")] = Path(".data"),
    devices: Annotated[int, typer.Option(min=2, help="How many simulated devices.")] = 12,
    full: Annotated[int, typer.Option(min=1, help="How many of them train; the others fit heads.")] = 4,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the recipe's.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The broker's port; a free one by default.")
    ] = None,
    runs: RunsOption = Path("runs"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the devices' and the broker's folders too.")
    ] = False,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Over mTLS, with a certificate for the broker, the server and each device."
        ),
    ] = False,
    beside: Annotated[
        bool,
        typer.Option("--beside", help="With --secure: first run it in plaintext, to see what TLS costs."),
    ] = False,
) -> None:
    """See it work: a broker, a server and simulated devices learn together on this machine; takes about a minute."""
    from dataclasses import replace

    from server import demo as demos

    interrupt_on_sigterm()
    asked = demos.DemoOptions(dataset, data_dir, devices, full, rounds, port, runs, keep, secure)
    plain_s = demos.run(replace(asked, secure=False)).seconds if beside else None
    found = demos.run(asked)
    print(found.histogram, end="\n\n")
    show_table([*found.devices], demos.DEVICE_COLUMNS)
    print()
    show_table([*found.comparison], demos.COMPARISON_COLUMNS)
    print(f"\n{found.note}\nThe results are in {found.path}")
    print(
        f"It took {found.seconds:.1f} s" + (" over mTLS" if secure else ""),
        end="\n" if plain_s is None else ", ",
    )
    if plain_s is not None:
        print(f"{plain_s:.1f} s in plaintext: {found.seconds / plain_s:.2f} times as long")
