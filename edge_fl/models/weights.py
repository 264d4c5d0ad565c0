"""ImageNet weights of torchvision, read from the local cache only: a missing file is an error that says where to put it."""

from __future__ import annotations

from pathlib import Path

import torch
import torchvision
from torch import nn

from edge_fl.errors import DataError


def load_imagenet(network: nn.Module, enum: str) -> None:
    """Loads the default weights of a torchvision `enum` ("ResNet18_Weights") into the network. Raises DataError."""
    url = getattr(torchvision.models, enum).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    if not path.is_file():
        raise DataError(f"{path}: not there; put torchvision's {path.name} into that folder")
    # torchvision's own files come in torch's format; weights_only reads tensors and nothing else.
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # noqa: TID251
