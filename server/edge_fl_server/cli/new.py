"""The command `edge-fl new`: write a recipe for devices with pictures and a server without any."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError, DataError, MethodError
from edge_fl.files import paths
from edge_fl.options import DATA, TRAINING, argument, option

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import Recipe

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
NEXT = """\
edge-fl server run {path}
edge-fl device run --tier head --host HOST --id DEVICE --data PICTURES"""


def new(
    name: Annotated[str, argument("NAME", "Name of the recipe; NAME.toml is written.")],
    images: Annotated[
        Path | None,
        option(
            "--images FOLDER",
            "Folder of pictures by class: a sample; the names of its folders are the classes.",
            DATA,
        ),
    ] = None,
    classes: Annotated[
        str, option("--classes CLASSES", "Classes, comma-separated, instead of --images.")
    ] = "",
    model: Annotated[
        str, option("--model MODEL", "Model of 'edge-fl models list' [efficientnet-lite0].", TRAINING)
    ] = "",
) -> None:
    """Write a recipe for devices with pictures: they fit personal classifiers on a pretrained network, the server needs no data."""
    from edge_fl.config import ModelConfig
    from edge_fl.data.class_names import require_class_names
    from edge_fl_server.recipes import new as recipes
    from edge_fl_server.recipes.recipe import parse

    name = name.removesuffix(".toml")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"new {name}: expected a name of a-z, 0-9, '.' and '-', as in: edge-fl new pets --classes cat,dog"
        )
    if bool(images) == bool(classes):
        raise ConfigError(
            f"new {name}: expected either --images FOLDER, with a folder of pictures per class, or --classes cat,dog,horse"
        )
    path, model = Path(f"{name}.toml"), model or recipes.MODEL
    recipes.require_absent(path)
    names = [each.strip() for each in classes.split(",")]
    if images:
        found = recipes.scan(images)
        names = list(found.classes)
        for each, count in found.classes.items():
            print_status(f"{each}: {count} picture{'s' * (count != 1)}")
        for remark in found.remarks:
            print_status(remark)
    names = require_class_names(names, f"new {name}")

    # These import torch: invalid names are reported before.
    from edge_fl.models import backbone_input

    has_input = backbone_input(ModelConfig(model)) is not None
    text = recipes.recipe_text(name, names, model, has_input=has_input)
    missing = _missing(parse(text, paths.text(path)))
    recipes.write(path, text)
    print_status(f"{paths.text(path)}: {len(names)} classes, model {model}; any text editor changes it")
    if not has_input:
        print_status(
            f"{model} has no pretrained weights: heads on random features are weak; a backbone such as {recipes.MODEL} has some"
        )
    if missing:
        print_status(f"before the run: {missing}")
    print_status(
        "next, with a broker ('edge-fl broker up'): the server here, and the second command on each device"
    )
    print(NEXT.format(path=path))


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
