"""Write a recipe for devices with pictures and a server without any (`edge-fl new`), and read class names from a sample of pictures."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from edge_fl.data.class_names import class_of, folder_remarks
from edge_fl.errors import ConfigError, DataError
from edge_fl.files import atomic, paths
from edge_fl.files.folder import is_system, walk
from edge_fl.modalities import ABOUT

MODEL = "efficientnet-lite0"
OWN_INPUT = 64  # pixels: side of the input of a network that declares none
MOST_NAMED = 5
RECIPE = """\
# {name}: a recipe, written by 'edge-fl new'. Change anything; settings that are not here have a default.
#
# What happens: the server has no pictures and trains nothing. It exports the network [model] as it is, signs it and sends
# it to your devices. Each device fits a personal classifier of its own pictures on it. Pictures never leave a device.
#
# How devices help each other: the network alone has no classifier, so the first devices need labelled pictures of each
# class. Where five or more devices with certificates have labels, the sum of their class statistics becomes the fleet's
# head of the next release: a new device predicts with it at once, without labels, and adapts it to its own.

name = "{name}"
source = "none"

[data]
# One folder of pictures per class on every device: cat/1.jpg, cat/2.jpg, dog/1.jpg, ... A device may lack some classes.
# To add a class later, append it here and run again: devices keep what they learnt. Never reorder or remove names.
classes = {classes}
{input}
[model]
# A network of 'edge-fl models list', or timm:NAME. A larger one is more accurate and slower on the devices.
name = "{model}"
train = "none" # its weights stay as they are

[release]
# The run ends when at least this many devices, and all that are online, have reported, or after wait_s seconds.
# 'edge-fl server up' serves devices that come later.
heads = 1
wait_s = 600.0

[statistics]
# Devices with certificates help each other: they add counts and sums over their labelled pictures to masked sums over at
# least 5 devices, and every device's classifier learns from the total. The server sees the total alone. "none" switches
# it off for all devices, uploads = false in a device's settings for this device. Without certificates nothing is sent.
sums = "auto"
minimum = 5

[broker]
host = "127.0.0.1" # of the MQTT broker: 'edge-fl broker up', or your own
"""
INPUT = """
[input]
shape = [3, {side}, {side}] # channels, height, width: pictures are resized to this
"""


@dataclass(frozen=True)
class PictureFolders:
    """Classes of a folder with the number of pictures of each, and remarks about the rest of the folder."""

    classes: dict[str, int]
    remarks: tuple[str, ...]


def scan(folder: Path) -> PictureFolders:
    """Read the class names from a folder with one folder of pictures per class. Raises DataError for fewer than two."""
    if not folder.is_dir():
        raise DataError(
            f"{paths.text(folder)}: no such folder; expected one folder of pictures per class in it"
        )
    listing = walk(folder)
    places = [
        path.relative_to(folder).parts
        for path in listing.files
        if path.suffix.lower() in ABOUT["picture"].suffixes
    ]
    counts = Counter(name for parts in places if len(parts) == 2 and (name := class_of(parts[0])))
    loose = [parts[0] for parts in places if len(parts) == 1]
    remarks = []
    for name in listing.folders:
        deeper = sorted({parts[1] for parts in places if parts[0] == name and len(parts) > 2})
        if deeper:
            remarks.append(
                f"{paths.text(folder / name)}: pictures one level too deep, in {_some(deeper)};"
                f" expected {paths.text(folder)}/CLASS/PICTURE, or --images {paths.text(folder / name)}"
            )
        elif class_of(name) and class_of(name) not in counts:
            remarks.append(f"{paths.text(folder / name)}: no pictures in it, so it is no class")
    remarks += [
        f"{paths.text(path)}: hidden, so it is no class"
        for path in sorted(folder.iterdir())
        if path.name.startswith(".") and path.is_dir() and not is_system(path.name)
    ]
    remarks += [f"{paths.text(path)}: {why}" for path, why in listing.skipped if path.parent == folder]
    remarks += folder_remarks(listing)
    if loose:
        remarks.append(
            f"{len(loose)} pictures directly in {paths.text(folder)} ({_some(loose)}): move each into the folder of its class,"
            f" such as {paths.text(folder / 'CLASS' / loose[0])}"
        )
    if len(counts) < 2:
        found = f"pictures of {len(counts)} class{'es' * (not counts)}"
        why = "".join(f"; {remark}" for remark in remarks)
        raise DataError(
            f"{paths.text(folder)}: {found}, expected two or more folders with pictures in it{why}"
        )
    return PictureFolders(dict(sorted(counts.items())), tuple(remarks))


def recipe_text(name: str, classes: list[str], model: str, *, has_input: bool) -> str:
    """The text of a recipe with source "none"; without `has_input` it declares an input, because the model's weights do not."""
    return RECIPE.format(
        name=name,
        classes=json.dumps(classes, ensure_ascii=False),
        model=model,
        input="" if has_input else INPUT.format(side=OWN_INPUT),
    )


def require_absent(path: Path) -> None:
    """Raise ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(
            f"{paths.text(path)}: exists; expected a new name, or remove the file first",
            consequence="it was not changed",
        )


def write(path: Path, text: str) -> None:
    """Write a new file. Raises ConfigError if it exists or cannot be written."""
    require_absent(path)
    try:
        atomic.write(path, text)
    except OSError as error:
        raise ConfigError(f"{paths.text(path)}: cannot be written ({error.strerror})") from error


def _some(names: list[str]) -> str:
    return ", ".join(map(paths.text, names[:MOST_NAMED])) + ", ..." * (len(names) > MOST_NAMED)
