"""Commands on what there is to choose from: the groups `methods`, `models`, `heads`, `datasets` and `data`."""

from pathlib import Path
from typing import Annotated, Literal

from edge_fl import plugins
from edge_fl.console.output import Format, print_status, show_json, show_paths, show_table, show_text
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError
from edge_fl.options import DATA, DATA_DIR, TRAINING, FormatOption, argument, option
from edge_fl_server.cli.options import RateOption, WindowOption

DESCRIPTION = {"description": Column("description", prose=True)}


def list_models(format: FormatOption = Format.TABLE) -> None:
    """List the models for --model, with their options (--set model.options.NAME=VALUE) and the pretrained weights found here."""
    from edge_fl_lab import catalogue

    columns: Columns = {
        "name": "name",
        "options": Column("options", prose=True),
        **DESCRIPTION,
        "weights": "weights",
    }
    show_table(catalogue.models(), columns, format)


def list_heads(format: FormatOption = Format.TABLE) -> None:
    """List the heads for --head, those of installed packages included."""
    from edge_fl_lab import catalogue

    rows = catalogue.personal_heads()
    show_table(rows, {"name": "name", "package": "package", **DESCRIPTION}, format)


def list_datasets(
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"), format: FormatOption = Format.TABLE
) -> None:
    """List the datasets for --dataset: the known ones, and the .npz files in the data folder."""
    from edge_fl.data import datasets

    rows = [
        {
            "name": listing.name,
            "available": listing.available,
            "samples": listing.input.form if listing.input else "picture",
            "classes": len(listing.classes) or None,
            "domains": ", ".join(listing.domains),
            "where": listing.where,
        }
        for listing in datasets.listings(data_dir)
    ]
    prose = {key: Column(key, prose=True) for key in ("domains", "where")}
    show_table(rows, {**{key: key for key in rows[0]}, **prose}, format)


def list_methods(format: FormatOption = Format.TABLE) -> None:
    """List every method: family, shared and personal parts, behaviour of head-only devices, paper."""
    from edge_fl_lab.catalogue import COLUMNS, rows

    columns = {key: Column(heading, prose=key != "name") for key, heading in COLUMNS.items()}
    columns["citation"] = Column(COLUMNS["citation"], prose=True, rank=1)
    show_table(rows(), columns, format)


def show_method(
    name: Annotated[str, argument("METHOD", "A method of 'edge-fl methods list', or package.module:Class.")],
    model: Annotated[
        str, option("--model MODEL", "Model of 'edge-fl models list', for which bytes are counted.", TRAINING)
    ] = "cnn2",
    egress: Annotated[
        bool, option("--egress", "Print only what may leave a device, by tier, as JSON.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show one method: hyper-parameters with range and source, shared parts, bytes per round, deviations from the paper."""
    from edge_fl_lab import catalogue

    plugins.allow_working_folder()
    if egress:
        print(catalogue.egress_json(name))
    elif format is Format.JSON:
        show_json(catalogue.facts(name, model))
    else:
        show_text(catalogue.describe(name, model))


def recommend_method(
    clients: Annotated[int, option("--clients N", "Number of clients, which train.", DATA, min=1)],
    samples: Annotated[int, option("--samples N", "Training images of each of them, on average.", min=1)],
    tier: Annotated[
        Literal["full", "head"], option("--tier TIER", "Kind of device: full or head, whose accuracy counts.")
    ] = "full",
    own_labels: Annotated[
        int | None,
        option(
            "--own-labels N",
            "Labels of each head-only device, in all; with --tier head: what to expect of its head.",
            min=0,
        ),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Recommend a method from a stored study, with the evidence; see docs/choosing-a-method.md.

    With --own-labels, the study of devices with few labels answers: accuracy of the served head, of the own head alone, and of the fleet's.
    """
    from edge_fl_lab import day_zero, recommend

    if own_labels is not None:
        if tier != "head":
            raise ConfigError(
                f"--own-labels {own_labels} with --tier {tier}: expected --tier head; only head-only devices are measured by labels",
                "nothing was recommended",
            )
        answer = day_zero.recommend(day_zero.load(), own_labels, clients, samples)
        if format is Format.JSON:
            show_json(answer)
        else:
            show_text(day_zero.text(answer))
        return
    found = recommend.recommend(recommend.load(), tier, clients, samples)
    if format is Format.JSON:
        show_json(found)
    else:
        show_text(recommend.text(found))


def download(
    name: Annotated[
        str, argument("NAME", "A dataset that torchvision can download: 'edge-fl datasets list'.")
    ],
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"),
    format: FormatOption = Format.TABLE,
) -> None:
    """Download a dataset with torchvision, or convert its original files if they are already in the folder."""
    from edge_fl_lab import dataset_files

    show_paths({"data": dataset_files.download(name, data_dir)}, format)


def convert(
    folder: Annotated[
        Path,
        argument(
            "FOLDER", "Pictures or other files by class, or a folder of PFLlib or LEAF with train and test."
        ),
    ],
    name: Annotated[str, argument("NAME", "Name of the new dataset.")],
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"),
    size: Annotated[
        int, option("--size N", "Pixels per side, of converted pictures.", min=8, max=1024)
    ] = 224,
    kind: Annotated[
        Literal["picture", "series", "audio", "table"] | None,
        option("--kind KIND", "Kind of files: picture, series, audio, table [by their names]."),
    ] = None,
    window: WindowOption = 0.0,
    rate: RateOption = 0.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Convert pictures, recordings or tables, or a dataset that PFLlib or LEAF split over clients, to an .npz file for --dataset.

    With a folder per class, or one per person or site with these in it, which become domains. A dataset that is split gets a
    file for --set data.split=FILE, too.
    """
    from edge_fl_lab import dataset_files

    if dataset_files.holds_classes(folder):
        data, unusable, remarks = dataset_files.convert_files(
            folder, name, data_dir, kind, size, window_s=window, rate=rate
        )
        for remark in remarks:
            print_status(remark)
        if unusable:
            print_status(f"{unusable} files of another kind, or damaged, are left out")
        show_paths({"data": data}, format)
        return
    data, split, left_out = dataset_files.convert(folder, name, data_dir)
    if left_out:
        print_status(f"{left_out} clients without training or test samples are left out")
    show_paths({"data": data, "split": split}, format)
