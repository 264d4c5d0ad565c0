"""`edge-fl data download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import App


def register(app: App) -> None:
    """Add the group `data`."""
    app.group("data", "Datasets, as .npz files in a folder.").command()(download)


def download(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, emnist, cifar10 or cifar100.")],
    data_dir: Annotated[Path, typer.Option(help="Folder to write the .npz file to.")] = Path(".data"),
) -> None:
    """Download a dataset with torchvision, or convert its original files if they are already in the folder."""
    from server import dataset_download

    print(dataset_download.download(name, data_dir))
