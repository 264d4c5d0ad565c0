"""Weights of pretrained networks: local files, read without executing pickled code. Nothing is downloaded.

In a run's specification `ModelConfig.weights` ends in "@" and the file's sha256, so that every device checks that it has the same file.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from edge_fl.errors import MethodError, brief
from edge_fl.files.paths import text

RANDOM = "random"
_PINNED = re.compile(r"(.*)@([0-9a-f]{64})")
State = dict[str, Tensor]


class Source(NamedTuple):
    """Where a network's pretrained weights are looked for.

    files: possible places, first to last; destination: the one to name if none exists; origin: where the file comes from, in words.
    """

    files: tuple[Path, ...]
    destination: Path
    origin: str

    def found(self) -> Path | None:
        """The first file that exists."""
        return next((path for path in self.files if path.is_file()), None)


def folder() -> Path:
    """The folder of weights: $EDGE_FL_WEIGHTS, by default ~/.cache/edge-fl/weights."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "edge-fl" / "weights"
    return Path(os.environ.get("EDGE_FL_WEIGHTS") or cache).expanduser()


def locate(name: str, given: str, source: Source | None) -> Path | None:
    """The file of a network's weights; None for random ones. `source` is that of the pretrained weights, `given` a recipe's setting.

    Raises MethodError if the file is missing, or is another one than on the server.
    """
    file, digest = _split(given)
    if file == RANDOM:
        return None
    if file:
        places = (Path(file).expanduser(), folder() / Path(file).name)
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            others = '"" (pretrained), "random" or a file' if source else '"random" or a file'
            raise MethodError(
                f"model {name}: no file {text(places[0])} or {text(places[1])}; weights: expected {others}"
            )
    elif source is None:
        return None
    else:
        path = source.found()
        if path is None:
            raise MethodError(
                f"model {name}: {source.files[0].name} not found; expected {source.origin} as {text(source.destination)}"
                ' (or weights = "random")'
            )
    if digest and _sha256(path, path.stat().st_mtime_ns) != digest:
        raise MethodError(
            f"{text(path)}: sha256 {_sha256(path, path.stat().st_mtime_ns)[:12]}, the run's weights of {name} have {digest[:12]};"
            " expected the server's file"
        )
    return path


def pinned(given: str, path: Path | None) -> str:
    """The setting `given` with the sha256 of the file that it means."""
    if path is None:
        return given
    return f"{_split(given)[0]}@{_sha256(path, path.stat().st_mtime_ns)}"


def read(path: Path) -> State:
    """The tensors of a .safetensors file, or of a .pth file as torch.save writes it. Raises MethodError."""
    return dict(_read(path, path.stat().st_mtime_ns))


def load(module: nn.Module, state: Mapping[str, Tensor], path: Path, name: str) -> None:
    """Load a file's tensors into a network. Raises MethodError unless names and shapes are the network's."""
    own = module.state_dict()
    fitting = sum(key in state and state[key].shape == tensor.shape for key, tensor in own.items())
    if fitting < len(own) or len(state) > len(own):
        raise misfit(path, name, f"{fitting} of its {len(own)} tensors fit, the file has {len(state)}")
    module.load_state_dict({key: state[key] for key in own})


def misfit(path: Path, name: str, why: object) -> MethodError:
    """The error about a file with the weights of another network."""
    return MethodError(f"{text(path)}: not weights of {name}: {brief(' '.join(str(why).split()))}")


def _split(given: str) -> tuple[str, str]:
    match = _PINNED.fullmatch(given)
    return (match[1], match[2]) if match else (given, "")


@lru_cache(maxsize=8)
def _sha256(path: Path, modified_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=1)  # a net is built several times
def _read(path: Path, modified_ns: int) -> State:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251  # reads only tensors
    except Exception as error:  # both libraries raise various types
        reason = str(error).strip().partition("\n")[0]
        raise MethodError(
            f"{text(path)}: cannot be read as weights ({type(error).__name__}: {brief(reason)})"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise MethodError(
            f"{text(path)}: holds a {type(state).__name__}, expected a dict of tensors (a state dict)"
        )
    return dict(state)
