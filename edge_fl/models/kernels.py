"""Random convolution kernels for windows of series [C, T]: an extractor without trained weights, drawn from a seed.

The kernels are those of MiniRocket (A. Dempster, D. Schmidt, G. Webb, KDD 2021, arXiv:2012.08791): nine weights, three of them 2 and six
-1, dilated up to the length of the window, on the sum of a random subset of the standardised channels. Of its result y [T] each kernel
gives the share of values above its bias. As a kernel's weights sum to 0, the means of the channels are features, too.

Different from MiniRocket: a share counts values near the bias in part (RAMP), because with a step the last bit of a sum would change a
feature; biases and the scale of features are those of synthetic windows, so that a server without data draws the same network; and few
kernels, each with a bias of its own, so that class statistics hold the covariance of all features (docs/models.md has figures).
All is drawn in float64 and equal on every machine.
"""

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

LENGTH = 9
KERNELS = np.array(
    [[2.0 if i in two else -1.0 for i in range(LENGTH)] for two in combinations(range(LENGTH), 3)]
)
DILATIONS = 5
RAMP = 1.0
"""Standard deviations of y over which a value counts in part."""
WINDOWS = 64

Doubles = NDArray[np.float64]


class _Drawn(NamedTuple):
    """dilations; of the kernels of each: weights [k, C, 9] and bias [k]; mean and spread of the features [d]."""

    dilations: tuple[int, ...]
    weights: list[Doubles]
    biases: list[Doubles]
    mean: Doubles
    spread: Doubles


class RandomKernels(nn.Module):
    """Standardised windows [N, C, T] -> features [N, d]: the means of the channels, then the kernels' shares; all tensors are constants."""

    mean: Tensor
    spread: Tensor

    def __init__(self, input: InputSpec, feature_dim: int = 128, seed: int = 0) -> None:
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
        constants = {f"weight{i}": each for i, each in enumerate(drawn.weights)}
        constants |= {f"bias{i}": each for i, each in enumerate(drawn.biases)}
        for name, values in {**constants, "mean": drawn.mean, "spread": drawn.spread}.items():
            self.register_buffer(name, torch.from_numpy(values).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kernels = [
            (getattr(self, f"weight{i}"), getattr(self, f"bias{i}")) for i in range(len(self.dilations))
        ]
        return (_features(x, self.dilations, kernels) - self.mean) / self.spread


def _features(x: Tensor, dilations: tuple[int, ...], kernels: list[tuple[Tensor, Tensor]]) -> Tensor:
    found = [x.mean(2)]
    for dilation, (weight, bias) in zip(dilations, kernels, strict=True):
        y = F.conv1d(x, weight, bias, padding=LENGTH // 2 * dilation, dilation=dilation)
        found.append(y.clamp(0, 1).mean(2))
    return torch.cat(found, dim=1)


@lru_cache(maxsize=8)
def _drawn(channels: int, length: int, feature_dim: int, seed: int) -> _Drawn:
    """Draw the kernels, then their biases and the scale of the features from synthetic windows."""
    rng = np.random.Generator(np.random.PCG64(seed))
    longest = int(np.log2(max((length - 1) // (LENGTH - 1), 1)))
    dilations = tuple(
        2**exponent for exponent in sorted({*np.linspace(0, longest, DILATIONS).astype(int).tolist()})
    )
    x = torch.from_numpy(synthetic(WINDOWS, channels, length, rng))
    count = feature_dim - channels
    order = np.concatenate([rng.permutation(len(KERNELS)) for _ in range(-(-count // len(KERNELS)))])[:count]
    quantiles = (
        np.arange(1, count + 1) * (np.sqrt(5) - 1) / 2 % 1
    )  # evenly spread over 0..1, as in MiniRocket
    weights, biases = [], []
    for number, dilation in enumerate(dilations):
        chosen = np.zeros((len(order[number :: len(dilations)]), channels, 1))
        for row in chosen:
            size = int(2 ** rng.uniform(0, np.log2(min(channels, LENGTH) + 1)))
            row[rng.choice(channels, size, replace=False)] = 1
        weight = chosen * KERNELS[order[number :: len(dilations)], None]
        y = F.conv1d(x, torch.from_numpy(weight), padding=LENGTH // 2 * dilation, dilation=dilation).numpy()
        slopes = 1 / (RAMP * y.std(axis=(0, 2)))
        wanted = zip(y.swapaxes(0, 1), quantiles[number :: len(dilations)], strict=True)
        levels = np.array([np.quantile(values, quantile) for values, quantile in wanted])
        weights.append(weight * slopes[:, None, None])
        biases.append(0.5 - levels * slopes)
    kernels = [(torch.from_numpy(w), torch.from_numpy(b)) for w, b in zip(weights, biases, strict=True)]
    found = _features(x, dilations, kernels).numpy()
    return _Drawn(dilations, weights, biases, found.mean(axis=0), found.std(axis=0) + 1e-2)


def synthetic(count: int, channels: int, length: int, rng: np.random.Generator) -> Doubles:
    """Standardised windows [count, C, T] like those of sensors: noise and a periodic part of random spectra, amplitudes and levels."""
    each, both, bins = (count, 1, 1), (count, channels, 1), length // 2 + 1
    spectrum = rng.standard_normal((count, channels, bins)) + 1j * rng.standard_normal(
        (count, channels, bins)
    )
    spectrum *= np.maximum(np.arange(bins), 1.0) ** -rng.uniform(0, 1.5, each)
    spectrum[..., 0] = 0
    noise = np.fft.irfft(spectrum, length)
    cycles = np.exp(rng.uniform(0, np.log(max(length / 16, 2)), each)) * np.arange(length) / length
    waves = (
        rng.standard_normal(both)
        / harmonic
        * np.sin(2 * np.pi * (harmonic * cycles + rng.uniform(0, 1, both)))
        for harmonic in (1, 2, 3)
    )
    share = rng.uniform(0, 1, each)
    x = share * sum(waves) + (1 - share) * noise / noise.std(axis=2, keepdims=True)
    x = x * np.exp(rng.normal(0, 0.7, each) + rng.normal(0, 0.7, both)) + rng.standard_normal(both)
    standardised: Doubles = (x - x.mean(axis=(0, 2), keepdims=True)) / x.std(axis=(0, 2), keepdims=True)
    return standardised
