"""`edge-fl data download` and `edge-fl data convert`."""

from pathlib import Path
from typing import Annotated

from edge_fl.cli import App
from edge_fl.console.output import Format, print_status, show_paths
from edge_fl.options import DATA_DIR, FormatOption, argument, option


def register(app: App) -> None:
    """Add the group `data`."""
    data = app.group("data", "Datasets, as .npz files in a folder: download, convert.", "Research")
    data.add(download, "edge-fl data download fashion-mnist")
    data.add(convert, "edge-fl data convert pictures pets")


def download(
    name: Annotated[str, argument("NAME", "mnist, fashion-mnist, emnist, cifar10 or cifar100.")],
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"),
    format: FormatOption = Format.TABLE,
) -> None:
    """Download a dataset with torchvision, or convert its original files if they are already in the folder."""
    from edge_fl_lab import dataset_download

    show_paths({"data": dataset_download.download(name, data_dir)}, format)


def convert(
    folder: Annotated[
        Path,
        argument(
            "FOLDER", "Folders of pictures by class, or a folder of PFLlib or LEAF with train and test."
        ),
    ],
    name: Annotated[str, argument("NAME", "Name of the new dataset.")],
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"),
    size: Annotated[int, option("--size N", "Pixels per side of converted pictures.", min=8, max=1024)] = 224,
    format: FormatOption = Format.TABLE,
) -> None:
    """Convert pictures, or a dataset that PFLlib or LEAF split over clients, to an .npz file for --dataset.

    A dataset that is split gets a file for --set data.split=FILE, too.
    """
    from edge_fl_lab import dataset_convert

    if dataset_convert.holds_pictures(folder):
        data, unusable, remarks = dataset_convert.convert_pictures(folder, name, data_dir, size)
        for remark in remarks:
            print_status(remark)
        if unusable:
            print_status(f"{unusable} files that are no pictures, or damaged, are left out")
        show_paths({"data": data}, format)
        return
    data, split, left_out = dataset_convert.convert(folder, name, data_dir)
    if left_out:
        print_status(f"{left_out} clients without training or test samples are left out")
    show_paths({"data": data, "split": split}, format)
