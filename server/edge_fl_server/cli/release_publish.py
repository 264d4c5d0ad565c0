"""`edge-fl release publish`: release an extractor that no run trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from edge_fl.console import units
from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError
from edge_fl.files import paths
from edge_fl.options import BrokerAddressOptions, argument, option
from edge_fl_server.cli.options import RegistryPlace
from edge_fl_server.cli.release_rollouts import WAIT_S, Wait, carry_out, commands, rollout_plan

if TYPE_CHECKING:
    from edge_fl_server.release.export import Description, Exported, QuantisedExtractor
    from edge_fl_server.release.foreign import ForeignInput

Resizing = Literal["crop", "letterbox", "stretch"]
ClassesOption = Annotated[
    str,
    option(
        "--classes CLASSES", "The classes, comma-separated; later releases may only append to them.", "Model"
    ),
]


def made_by_model(
    model: str, weights: str, classes: list[str], size: int, resize: Resizing
) -> tuple[Exported, Description]:
    """Export a network that edge-fl builds."""
    from msgspec.structs import replace

    from edge_fl.config import ModelConfig
    from edge_fl.data.partition import DataConfig
    from edge_fl.inputs import InputSpec
    from edge_fl.methods import build_method
    from edge_fl.methods.contract import steps
    from edge_fl.models import backbone_input
    from edge_fl_server.recipes.recipe import Recipe
    from edge_fl_server.release import export
    from edge_fl_server.training import studies

    config = ModelConfig(model, weights=weights, train="none")
    if backbone_input(config) is None:
        input = InputSpec((3, size, size)) if size else None
    else:
        config = replace(config, options={"size": size} if size else {})
        input = backbone_input(config)
    input = replace(input, resize=resize) if input else None
    data = DataConfig(classes=classes)
    _, spec = studies.without_data(Recipe(source="none", data=data, model=config, input=input))
    method = build_method(spec)
    return export.export(method, steps.start(method)), export.describe(method, spec)


def made_elsewhere(
    file: Path, given: ForeignInput, reference: Path | None, classes: list[str]
) -> tuple[Exported, Description]:
    """Read a model that another program exported."""
    from edge_fl.heads.plan import HeadPlan
    from edge_fl.methods import PRETRAINED
    from edge_fl.methods.contract.tiers import STEPS
    from edge_fl_server.release import foreign_child
    from edge_fl_server.release.export import Description, Exported

    found = foreign_child.read(file, given, reference)
    exported = Exported(found.onnx, found.feature_dim, opset=found.opset, ir=found.ir)
    return exported, Description(PRETRAINED, classes, found.input, heads=HeadPlan("cosine", min_steps=STEPS))


def quantised(exported: Exported, description: Description, images: Path) -> QuantisedExtractor | None:
    """The int8 variant, calibrated on pictures; None if it misses its gate."""
    from edge_fl_server.recipes.recipe import QuantiseConfig
    from edge_fl_server.release import class_pictures, quantise

    data = class_pictures.pictures(images, description.classes, description.input)
    make = quantise.quantiser([data], QuantiseConfig(int8=True), description.seed, print_status)
    return make(exported.onnx, len(description.classes), description.unit_norm)


def publish(
    file: Annotated[
        Path | None, argument("FILE", "An ONNX model: pixels [N, C, H, W] in, features [N, d] out.")
    ] = None,
    classes: ClassesOption = "",
    model: Annotated[
        str, option("--model MODEL", "A model of 'edge-fl models list', instead of a file.", "Model")
    ] = "",
    weights: Annotated[
        str,
        option("--weights WEIGHTS", "Weights of --model: a file, or random [its pretrained ones].", "Model"),
    ] = "",
    mean: Annotated[
        str,
        option(
            "--mean NUMBERS", "Mean per channel that the file expects to be subtracted from 0..1.", "Model"
        ),
    ] = "",
    std: Annotated[
        str, option("--std NUMBERS", "Standard deviation per channel to divide by after --mean.", "Model")
    ] = "",
    size: Annotated[
        int, option("--size N", "Pixels per side, where the model does not fix them.", "Model", min=0)
    ] = 0,
    resize: Annotated[
        Resizing, option("--resize HOW", "How a picture gets this size: crop, letterbox or stretch.", "Model")
    ] = "crop",
    reference: Annotated[
        Path | None,
        option("--reference FILE", "An .npz with x and features of the file, to compare with.", "Model"),
    ] = None,
    images: Annotated[
        Path | None,
        option("--images FOLDER", "A folder of pictures per class: also release an int8 variant.", "Model"),
    ] = None,
    stages: Annotated[
        str,
        option(
            "--stages SHARES",
            "Growing shares of the fleet, comma-separated; the last is 1 [by its size].",
            "Roll-out",
        ),
    ] = "",
    wait_s: Wait = WAIT_S,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Release an extractor without a training run, from a file or a model's name, and roll it out; devices fit their heads on it."""
    from edge_fl.data.class_names import require_class_names
    from edge_fl.errors import shortened
    from edge_fl_server.release.foreign import ForeignInput

    if (file is None) == (not model):
        raise ConfigError("release publish: expected either a file, such as model.onnx, or --model NAME")
    names = [name.strip() for name in classes.split(",")] if classes else []
    names = require_class_names(names, "release publish, --classes")
    plan = rollout_plan(stages)
    with commands(place, broker, new=True) as releases:
        releases.is_online()  # nothing is signed without a broker
        if file:
            if weights:
                raise ConfigError(
                    f"--weights {weights}: those of {paths.text(file)} are in the file; expected them with --model"
                )
            given = ForeignInput(_numbers("--mean", mean), _numbers("--std", std), size, resize)
            exported, description = made_elsewhere(file, given, reference, names)
        else:
            if mean or std or reference:
                raise ConfigError(
                    f"--mean, --std and --reference describe a file; those of {model} are known"
                )
            exported, description = made_by_model(model, weights, names, size, resize)
        int8 = quantised(exported, description, images) if images else None
        manifest = releases.sign(exported, description, int8)
        sides = "x".join(map(str, manifest.input.shape))
        print_status(
            f"release {manifest.release}: {units.size(manifest.extractor.bytes)}{' and int8' * bool(int8)},"
            f" {manifest.feature_dim} features of images {sides}, classes {shortened(manifest.classes, 10)}"
        )
        if releases.is_served(manifest.release):
            print_status(f"release {manifest.release}: rolled out before")
            print("completed")
            return
        carry_out(releases, releases.roll_out(manifest.release, plan), wait_s)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected numbers, such as 0.485,0.456,0.406") from error
