"""Random convolution kernels for windows of series [C, T]: an extractor without trained weights, drawn from a seed.

The kernels are those of MiniRocket (A. Dempster, D. Schmidt, G. Webb, KDD 2021, arXiv:2012.08791): nine weights, three of them 2 and six
-1, dilated up to the length of the window, on the sum of a random subset of the standardised channels. Of its result y [T] each kernel
gives the share of values above its bias. As a kernel's weights sum to 0, the means of the channels are features, too.

Different from MiniRocket: a share counts values near the bias in part (RAMP), because with a step the last bit of a sum would change a
feature; biases and the scale of features are those of synthetic windows, so that a server without data draws the same network; and few
kernels, each with a bias of its own (docs/models.md has figures).
All is drawn by hashes (`edge_fl.learn.random`) and equal on every machine, whatever its version of NumPy.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from edge_fl.errors import MethodError
from edge_fl.inputs import InputSpec
from edge_fl.learn.random import fold, key_of, normal, uniform

LENGTH = 9
KERNELS = np.array(
    [[2.0 if i in two else -1.0 for i in range(LENGTH)] for two in combinations(range(LENGTH), 3)]
)
DILATIONS = 5
RAMP = 1.0
"""Standard deviations of y over which a value counts in part."""
WINDOWS, VALUES = 64, 2**15
"""Synthetic windows, and their values per channel, at most; at least 8 windows."""

Doubles = NDArray[np.float64]


class _Drawn(NamedTuple):
    """dilations; of the kernels of each: channels [k, C, 1], weights [k, 1, 9], slopes and biases [k, 1]; of features: mean, spread [d]."""

    dilations: tuple[int, ...]
    kernels: list[tuple[Doubles, ...]]
    mean: Doubles
    spread: Doubles


class RandomKernels(nn.Module):
    """Standardised windows [N, C, T] -> features [N, d]: the means of the channels, then the kernels' shares; all tensors are constants."""

    mean: Tensor
    spread: Tensor

    def __init__(self, input: InputSpec, feature_dim: int = 1000, seed: int = 0) -> None:
        super().__init__()
        if input.kind != "series":
            raise MethodError(
                f"model random-kernels: input {list(input.shape)} {input.axes}, expected [C, T] CT"
            )
        if not input.channels < feature_dim <= 4096:
            raise MethodError(
                f"model random-kernels: feature_dim {feature_dim}, expected {input.channels + 1} to 4096"
            )
        drawn = _drawn(input.channels, input.window, feature_dim, seed)
        self.dilations, self.feature_dim = drawn.dilations, feature_dim
        constants = {
            f"kernels{i}_{j}": each for i, row in enumerate(drawn.kernels) for j, each in enumerate(row)
        }
        for name, values in {**constants, "mean": drawn.mean, "spread": drawn.spread}.items():
            self.register_buffer(name, torch.from_numpy(values).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kernels = [[getattr(self, f"kernels{i}_{j}") for j in range(4)] for i in range(len(self.dilations))]
        return (_features(x, self.dilations, kernels) - self.mean) / self.spread


def _features(x: Tensor, dilations: Sequence[int], kernels: Sequence[Sequence[Tensor]]) -> Tensor:
    found = [x.mean(2)]
    for dilation, (channels, weight, slope, bias) in zip(dilations, kernels, strict=True):
        found.append((_responses(x, dilation, channels, weight) * slope + bias).clamp(0, 1).mean(2))
    return torch.cat(found, dim=1)


def _responses(x: Tensor, dilation: int, channels: Tensor, weight: Tensor) -> Tensor:
    """Windows [N, C, T] -> results of kernels [N, k, T]; the sum of the channels comes first, so that each kernel has nine weights."""
    mixed, padding = F.conv1d(x, channels), LENGTH // 2 * dilation
    return F.conv1d(mixed, weight, padding=padding, dilation=dilation, groups=len(weight))


@lru_cache(maxsize=8)
def _drawn(channels: int, length: int, feature_dim: int, seed: int) -> _Drawn:
    """Draw the kernels, then their biases and the scale of the features from synthetic windows."""
    key, count = key_of(seed), feature_dim - channels
    longest = int(np.log2(max((length - 1) // (LENGTH - 1), 1)))
    dilations = tuple((2 ** np.unique(np.linspace(0, longest, DILATIONS).astype(int))).tolist())
    x = torch.from_numpy(
        synthetic(max(8, min(WINDOWS, VALUES // length)), channels, length, fold(key, 0))
    ).float()
    order = _uniform(key, 1, -(-count // len(KERNELS)), len(KERNELS)).argsort(axis=1).ravel()[:count]
    sizes = 2 ** (_uniform(key, 2, count, 1) * np.log2(min(channels, LENGTH) + 1))
    chosen = _uniform(key, 3, count, channels).argsort(axis=1).argsort(axis=1) < np.floor(sizes)
    quantiles = np.arange(1, count + 1) * (np.sqrt(5) - 1) / 2 % 1  # spread evenly, as in MiniRocket
    kernels = list[tuple[Doubles, ...]]()
    for rows in (np.arange(number, count, len(dilations)) for number in range(len(dilations))):
        dilation, channels_of = dilations[len(kernels)], chosen[rows, :, None].astype(np.float64)
        weight = KERNELS[order[rows], None]
        y = _responses(
            x, dilation, *(torch.from_numpy(each).float() for each in (channels_of, weight))
        ).numpy()
        slopes = 1 / (RAMP * y.std(axis=(0, 2)))
        levels = np.array([np.quantile(y[:, place], each) for place, each in enumerate(quantiles[rows])])
        kernels.append((channels_of, weight, slopes[:, None], 0.5 - (levels * slopes)[:, None]))
    found = _features(
        x, dilations, [[torch.from_numpy(part).float() for part in each] for each in kernels]
    ).numpy()
    return _Drawn(dilations, kernels, found.mean(axis=0), found.std(axis=0) + 1e-2)


def synthetic(count: int, channels: int, length: int, key: Tensor) -> Doubles:
    """Standardised windows [count, C, T] like those of sensors: noise and a periodic part of random spectra, amplitudes and levels."""
    each, both, bins = (count, 1, 1), (count, channels, 1), length // 2 + 1
    spectrum = _normal(key, 0, count, channels, bins) + 1j * _normal(key, 1, count, channels, bins)
    spectrum *= np.maximum(np.arange(bins), 1.0) ** (-1.5 * _uniform(key, 2, *each))
    spectrum[..., 0] = 0
    noise = np.fft.irfft(spectrum, length)
    cycles = max(length / 16, 2) ** _uniform(key, 3, *each) * np.arange(length) / length
    waves = (
        _normal(key, 10 + k, *both) / k * np.sin(2 * np.pi * (k * cycles + _uniform(key, 20 + k, *both)))
        for k in (1, 2, 3)
    )
    share = _uniform(key, 4, *each)
    x = share * sum(waves) + (1 - share) * noise / noise.std(axis=2, keepdims=True)
    x = x * np.exp(0.7 * (_normal(key, 5, *each) + _normal(key, 6, *both))) + _normal(key, 7, *both)
    return np.asarray((x - x.mean(axis=(0, 2), keepdims=True)) / x.std(axis=(0, 2), keepdims=True))


def _uniform(key: Tensor, number: int, *shape: int) -> Doubles:
    return np.asarray(uniform(fold(key, number), *shape), np.float64)


def _normal(key: Tensor, number: int, *shape: int) -> Doubles:
    return np.asarray(normal(fold(key, number), *shape), np.float64)
