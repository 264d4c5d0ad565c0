"""The command `edge-fl new`: write a recipe for devices with pictures, recordings or rows and a server without any."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError, DataError, MethodError, shortened
from edge_fl.files import paths
from edge_fl.options import DATA, TRAINING, argument, option
from edge_fl_server.cli.options import RateOption, WindowOption

if TYPE_CHECKING:
    from edge_fl.inputs import Kind
    from edge_fl_server.recipes.recipe import Recipe

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
NEXT = """\
edge-fl server run {path}
edge-fl device run --tier head --host HOST --id DEVICE --data {data}"""


def new(
    name: Annotated[str, argument("NAME", "Name of the recipe; NAME.toml is written.")],
    images: Annotated[
        Path | None,
        option(
            "--images FOLDER",
            "Folder by class: a sample of pictures; the names of its folders are the classes.",
            DATA,
        ),
    ] = None,
    series: Annotated[
        Path | None,
        option("--series FOLDER", "The same for recordings of sensors: CSV or NPZ files.", DATA),
    ] = None,
    audio: Annotated[
        Path | None, option("--audio FOLDER", "The same for recordings of sound: WAV or FLAC files.", DATA)
    ] = None,
    table: Annotated[
        Path | None,
        option("--table FOLDER", "The same for rows: CSV files by class, or with a column of classes.", DATA),
    ] = None,
    classes: Annotated[
        str, option("--classes CLASSES", "Classes, comma-separated, of pictures, instead of a folder.")
    ] = "",
    model: Annotated[
        str,
        option(
            "--model MODEL", "Model of 'edge-fl models list' [for pictures efficientnet-lite0].", TRAINING
        ),
    ] = "",
    window: WindowOption = 0.0,
    rate: RateOption = 0.0,
) -> None:
    """Write a recipe for devices with files by class: they fit personal classifiers on a network as it is, the server needs no data.

    The folder has a folder of files per class, or one per person or site with these in it.
    """
    from msgspec.structs import replace

    from edge_fl.config import ModelConfig
    from edge_fl.console.units import counted
    from edge_fl.data.class_names import require_class_names
    from edge_fl.inputs import InputSpec
    from edge_fl_server.recipes import new as recipes
    from edge_fl_server.recipes.recipe import parse

    name = name.removesuffix(".toml")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"new {name}: expected a name of a-z, 0-9, '.' and '-', as in: edge-fl new pets --classes cat,dog"
        )
    folders: dict[Kind, Path | None] = {"picture": images, "series": series, "audio": audio, "table": table}
    kind: Kind = next((kind for kind, folder in folders.items() if folder), "picture")
    folder = folders[kind]
    if sum(map(bool, (*folders.values(), classes))) != 1:
        raise ConfigError(
            f"new {name}: expected either --images FOLDER, with a folder of pictures per class, or --series, --audio or --table, or"
            " --classes cat,dog,horse"
        )
    if (window or rate) and kind not in ("series", "audio"):
        raise ConfigError(f"new {name}: --window and --rate cut recordings, expected --series or --audio")
    path, usual = Path(f"{name}.toml"), recipes.MODELS[kind]
    model = model or usual
    recipes.require_absent(path)
    names = [each.strip() for each in classes.split(",")]
    input, data = None, "PICTURES" if kind == "picture" else "FOLDER"
    if folder:
        found = recipes.scan(folder, kind, window_s=window, rate=rate)
        names, input = list(found.classes), found.input
        one = "picture" if kind == "picture" else "file"
        for each, count in found.classes.items():
            print_status(f"{each}: {counted(count, one)}" if count else each)
        for remark in found.remarks:
            print_status(remark)
        if found.domains:
            print_status(f"{len(found.domains)} devices can have a part each: {shortened(found.domains)}")
            data = f"{paths.text(folder)}/{found.domains[0]}{'.csv' * (0 in found.classes.values())}"
    names = require_class_names(names, f"new {name}")

    # These import torch: invalid names are reported before.
    from edge_fl.models import backbone_input

    own = backbone_input(ModelConfig(model))
    if own and input:
        input = replace(input, mean=own.mean, std=own.std)
    elif own is None and input is None:
        input = InputSpec((3, recipes.OWN_INPUT, recipes.OWN_INPUT))
    text = recipes.recipe_text(name, names, model, input)
    missing = _missing(parse(text, paths.text(path)))
    recipes.write(path, text)
    print_status(f"{paths.text(path)}: {len(names)} classes, model {model}; any text editor changes it")
    if own is None and model != usual:
        print_status(
            f"{model} has no pretrained weights: heads on random features are weak; {usual} is better as it is"
        )
    if missing:
        print_status(f"before the run: {missing}")
    print_status(
        "next, with a broker ('edge-fl broker up'): the server here, and the second command on each device"
    )
    print(NEXT.format(path=path, data=data))


def _missing(recipe: Recipe) -> str:
    """What this machine lacks to build the recipe's model; "" if nothing. Raises MethodError for an unknown model."""
    from edge_fl.models import build_net
    from edge_fl_server.training import studies

    _, spec = studies.without_data(recipe)
    try:
        build_net(spec.model, spec.input, len(spec.classes))
    except DataError as error:
        return error.message
    except MethodError as error:
        if "pip install" in error.message:
            return error.message
        raise
    return ""
