"""The dataset's normalisation as part of the extractor: devices input raw values (docs/methods-on-devices.md, "Export")."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.learn.network.chain import Chain


def normalised(x: Tensor, input: InputSpec) -> Tensor:
    """(x - mean) / std per channel, [N, C, ...]."""
    return (x - constant(input.mean, x)) / constant(input.std, x)


def constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Mean or std of an input per channel of samples `like` [N, C, ...]: [C, 1, ...]."""
    return like.new_tensor(values).expand(like.shape[1]).reshape(-1, *(1 for _ in like.shape[2:]))


class Normalised(Chain):
    """(x - mean) / std per channel, then the extractor; the constants are neither averaged nor sent."""

    mean: Tensor
    std: Tensor

    def __init__(self, extractor: nn.Module, input: InputSpec) -> None:
        super().__init__()
        self.extractor = extractor
        self.feature_dim = extractor.feature_dim
        for name, values in (("mean", input.mean), ("std", input.std)):
            constant = torch.tensor(values, dtype=torch.float32).expand(input.channels)
            shape = (1, -1, *(1 for _ in input.shape[1:]))
            self.register_buffer(name, constant.reshape(shape).clone(), persistent=False)

    def layers(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return self.standardise, self.extractor

    def standardise(self, x: Tensor) -> Tensor:
        """Normalise raw values; a method, so that the chain has it as one layer."""
        return (x - self.mean).div_(self.std)
