"""Write a recipe for devices with pictures, recordings or rows and a server without any (`edge-fl new`), from a sample of them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from edge_fl import modalities
from edge_fl.data.class_names import class_of, folder_remarks
from edge_fl.errors import ConfigError, DataError
from edge_fl.files import atomic, paths
from edge_fl.files.folder import is_system
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import ABOUT
from edge_fl_server import sample_folders

MODELS: dict[Kind, str] = {
    "picture": "efficientnet-lite0",
    "series": "random-kernels",
    "audio": "speech-embedding",
    "table": "identity",
}
"""Networks that are of use without training."""
OWN_INPUT = 64  # pixels: side of the input of a network that declares none
MOST_NAMED = 5
MOST_PER_FILE = 256
"""Samples of a file from which mean and standard deviation of the input are computed."""
RECIPE = """\
# {name}: a recipe, written by 'edge-fl new'. Change anything; settings that are not here have a default.
#
# What happens: the server has no data and trains nothing. It exports the network [model] as it is, signs it and sends
# it to your devices. Each device fits a personal classifier of its own data on it. Data never leave a device.
#
# How devices help each other: the network alone has no classifier, so the first devices need labelled data of each
# class. Where five or more devices with certificates have labels, the sum of their class statistics becomes the fleet's
# head of the next release: a new device predicts with it at once, without labels, and adapts it to its own.

name = "{name}"
source = "none"

[data]
# One folder per class on every device: cat/1.jpg, cat/2.jpg, dog/1.jpg, or walk/1.csv, run/1.csv, ... A device may lack
# some classes. Rows may have their class in a column instead.
# To add a class later, append it here and run again: devices keep what they learnt. Never reorder or remove names.
classes = {classes}
{input}
[model]
# A network of 'edge-fl models list'. For pictures, or timm:NAME: a larger one is more accurate and slower. random-kernels, for
# series, has no weights, so that nothing has to be trained; cnn1d, with source = "fleet", is trained by devices with torch.
name = "{model}"
train = "none" # its weights stay as they are

[release]
# The run ends when at least this many devices, and all that are online, have reported, or after wait_s seconds.
# 'edge-fl server up' serves devices that come later.
heads = 1
wait_s = 600.0

[statistics]
# Devices with certificates help each other: they add counts and sums over their labelled data to masked sums over at
# least 5 devices, and every device's classifier learns from the total. The server sees the total alone. "none" switches
# it off for all devices, uploads = false in a device's settings for this device. Without certificates nothing is sent.
sums = "auto"
minimum = 5

[broker]
host = "127.0.0.1" # of the MQTT broker: 'edge-fl broker up', or your own
"""
INPUT = """
[input]
# One sample. Pictures are resized to `shape`; a window of a recording has so many values, at `rate` per second, and one
# starts every `hop` values. Columns and channels are found by their names.
{settings}
"""


@dataclass(frozen=True)
class Scan:
    """Classes of a folder with the number of files of each (of rows 0), remarks on it, its domains, and the input if not of pictures."""

    classes: dict[str, int]
    remarks: list[str]
    domains: list[str]
    input: InputSpec | None = None


def scan(folder: Path, kind: Kind = "picture", **chosen: float) -> Scan:
    """Read the class names from a folder with one folder of files per class, or a folder for each person with these in it.

    chosen: window_s and rate of recordings, if they are given. Raises DataError for fewer than two classes.
    """
    found, files = sample_folders.find(folder, kind), ABOUT[kind].files
    listing, counts = found.listing, Counter(file.class_name for file in found.files if file.class_name)
    suffixes = ABOUT[kind].suffixes
    places = [path.relative_to(folder).parts for path in listing.files if path.suffix.lower() in suffixes]
    in_column = kind == "table" and bool(found.files) and not counts
    loose = [] if in_column else [parts[0] for parts in places if len(parts) == 1]
    remarks = []
    for name in () if found.domains else listing.folders:
        deeper = sorted({parts[1] for parts in places if parts[0] == name and len(parts) > 2})
        if deeper:
            remarks.append(
                f"{paths.text(folder / name)}: {files} one level too deep, in {_some(deeper)};"
                f" expected {paths.text(folder)}/CLASS/FILE, or --{'images' if kind == 'picture' else kind} {paths.text(folder / name)}"
            )
        elif class_of(name) and class_of(name) not in counts:
            remarks.append(f"{paths.text(folder / name)}: no {files} in it, so it is no class")
    remarks += [
        f"{paths.text(path)}: hidden, so it is no class"
        for path in sorted(folder.glob(".*"))
        if path.is_dir() and not is_system(path.name)
    ]
    remarks += [f"{paths.text(path)}: {why}" for path, why in listing.skipped if path.parent == folder]
    remarks += [*found.others, *folder_remarks(listing)]
    if loose:
        remarks.append(
            f"{len(loose)} {files} directly in {paths.text(folder)} ({_some(loose)}): move each into the folder of its class,"
            f" such as {paths.text(folder / 'CLASS' / loose[0])}"
        )
    input = None
    if kind != "picture" and (in_column or len(counts) > 1):
        input = found.input(**chosen)
        x, names, _, _, unusable = sample_folders.read(found.files, input, MOST_PER_FILE)
        remarks = [*unusable, *remarks]
        counts = Counter({name: counts[name] for name in names})
        input = modalities.of(kind).input_of(x, np.arange(len(x)), input)
    if len(counts) < 2:
        have = f"{files} of {len(counts)} class{'es' * (not counts)}"
        why = "".join(f"; {remark}" for remark in remarks)
        raise DataError(f"{paths.text(folder)}: {have}, expected two or more folders with {files} in it{why}")
    return Scan(dict(sorted(counts.items())), remarks, found.domains, input)


def recipe_text(name: str, classes: Sequence[str], model: str, input: InputSpec | None) -> str:
    """The text of a recipe with source "none"; without `input` it is that of the model's weights."""
    given = msgspec.to_builtins(input).items() if input else ()
    settings = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in given)
    return RECIPE.format(
        name=name,
        classes=json.dumps(classes, ensure_ascii=False),
        model=model,
        input=INPUT.format(settings=settings) if input else "",
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
