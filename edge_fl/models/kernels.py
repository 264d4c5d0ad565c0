"""Random convolution kernels for windows of series [C, T]: an extractor without trained weights, drawn from a seed.

The 84 kernels of MiniRocket (A. Dempster, D. Schmidt, G. Webb, KDD 2021, arXiv:2012.08791) have nine weights, three of them 2 and six -1.
With each of up to five dilations they are applied to the sum of a random subset of the standardised channels; of the result y [T] and a
bias b each gives one number: the share of T at which y is above b. To have at most `feature_dim` features, with few redundant ones, these
shares and the means of the channels are projected on their principal components, divided by the root of their standard deviation.

Biases and components are those of synthetic windows (`synthetic`), not of data, so that a server without data makes the same network.
Unlike MiniRocket's, a share counts values near the bias in part (RAMP): with a step, the last bit of a sum could change a feature. The
components are rounded to 8 bits. All is computed in float64 and equal on every machine.
"""

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from edge_fl.inputs import InputSpec

LENGTH = 9
KERNELS = np.array(
    [[2.0 if i in two else -1.0 for i in range(LENGTH)] for two in combinations(range(LENGTH), 3)]
)
DILATIONS = 5
"""Dilations, and pairs of dilation and bias, of each kernel, at most."""
RAMP = 0.1
"""Width in standard deviations of y over which a value counts in part."""
MEANS = 3.0
"""Weight of the channels' means: a kernel's weights sum to 0, so the shares say nothing of them."""
WINDOWS = 512

Doubles = NDArray[np.float64]


class _Drawn(NamedTuple):
    """channels [D, 84, C], slopes [D, 84] and offsets [B, D, 84] of the ramps, components int8 [F, d] with scale and shift [d]."""

    dilations: tuple[int, ...]
    channels: Doubles
    offsets: Doubles
    components: NDArray[np.int8]
    scale: Doubles
    shift: Doubles


class RandomKernels(nn.Module):
    """Standardised windows [N, C, T] -> features [N, feature_dim]; all tensors are constants."""

    channels: Tensor
    kernels: Tensor
    offsets: Tensor
    components: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, input: InputSpec, feature_dim: int = 128, seed: int = 0) -> None:
        super().__init__()
        drawn = _drawn(input.channels, input.window, feature_dim, seed)
        self.dilations, self.feature_dim = drawn.dilations, drawn.components.shape[1]
        for name, values in (("kernels", KERNELS[:, None]), *drawn._asdict().items()):
            if name != "dilations":
                tensor = torch.from_numpy(np.asarray(values))
                tensor = tensor.float() if tensor.is_floating_point() else tensor
                self.register_buffer(name, tensor.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = _shares(x, self.dilations, self.channels, self.kernels, self.offsets)
        return (found @ self.components.to(found.dtype)) * self.scale + self.shift


def _responses(x: Tensor, dilation: int, channels: Tensor, kernels: Tensor) -> Tensor:
    """Windows [N, C, T] -> y [N, 84, T]."""
    mixed = F.conv1d(x, channels[..., None])
    return F.conv1d(mixed, kernels, padding=LENGTH // 2 * dilation, dilation=dilation, groups=len(kernels))


def _shares(
    x: Tensor, dilations: tuple[int, ...], channels: Tensor, kernels: Tensor, offsets: Tensor
) -> Tensor:
    """Windows [N, C, T] -> shares of T above each bias, and the weighted means of the channels, [N, B * D * 84 + C]."""
    found = []
    for number, dilation in enumerate(dilations):
        y = _responses(x, dilation, channels[number], kernels)
        found += [(y - bias[number][:, None]).clamp(0, 1).mean(2) for bias in offsets]
    return torch.cat([*found, MEANS * x.mean(2)], dim=1)


def synthetic(count: int, channels: int, length: int, seed: int) -> Doubles:
    """Windows [count, C, T] like those of sensors: noise and a periodic part of random spectra, amplitudes and levels."""
    rng = np.random.Generator(np.random.PCG64(seed))
    each, both = (count, 1, 1), (count, channels, 1)
    bins = length // 2 + 1
    spectrum = rng.standard_normal((count, channels, bins)) + 1j * rng.standard_normal(
        (count, channels, bins)
    )
    spectrum *= np.maximum(np.arange(bins), 1.0) ** -rng.uniform(0, 1.5, each)
    spectrum[..., 0] = 0
    noise = np.fft.irfft(spectrum, length)
    noise /= noise.std(axis=2, keepdims=True)
    cycles = np.exp(rng.uniform(0, np.log(max(length / 16, 1)), each))
    periodic = sum(
        rng.standard_normal(both)
        / harmonic
        * np.sin(2 * np.pi * (harmonic * cycles * np.arange(length) / length + rng.uniform(0, 1, both)))
        for harmonic in (1, 2, 3)
    )
    mixture = rng.uniform(0, 1, each)
    x = mixture * periodic + (1 - mixture) * noise * np.exp(rng.normal(0, 0.7, both))
    x = x * np.exp(rng.normal(0, 0.7, each) + rng.normal(0, 0.5, both)) + rng.standard_normal(both)
    standardised: Doubles = (x - x.mean(axis=(0, 2), keepdims=True)) / x.std(axis=(0, 2), keepdims=True)
    return standardised


@lru_cache(maxsize=4)
def _drawn(channels: int, length: int, feature_dim: int, seed: int) -> _Drawn:
    """Draw the kernels' channels, then biases and components from synthetic windows."""
    rng = np.random.Generator(np.random.PCG64(seed))
    most = max((length - 1) // (LENGTH - 1), 1)
    exponents = np.linspace(0, np.log2(most), DILATIONS)
    dilations = tuple(sorted({int(2**exponent + 1e-9) for exponent in exponents}))
    biases = DILATIONS // len(dilations)
    chosen = np.zeros((len(dilations), len(KERNELS), channels))
    for row in chosen.reshape(-1, channels):
        size = int(2 ** rng.uniform(0, np.log2(min(channels, LENGTH) + 1)))
        row[rng.choice(channels, size, replace=False)] = 1
    x = torch.from_numpy(synthetic(WINDOWS, channels, length, seed))
    kernels = torch.from_numpy(KERNELS[:, None])
    offsets = np.empty((biases, len(dilations), len(KERNELS)))
    places = np.arange(biases * chosen[..., 0].size).reshape(offsets.shape)
    quantiles = (places + 1) * (np.sqrt(5) - 1) / 2 % 1  # evenly spread over 0..1, as in MiniRocket
    for number, dilation in enumerate(dilations):
        y = _responses(x, dilation, torch.from_numpy(chosen[number]), kernels).numpy()
        slopes = 1 / (RAMP * y.std(axis=(0, 2)))
        chosen[number] *= slopes[:, None]
        for bias, wanted in zip(offsets, quantiles, strict=True):
            for kernel, quantile in enumerate(wanted[number]):
                bias[number, kernel] = np.quantile(y[::8, kernel], quantile) * slopes[kernel] - 0.5
    found = _shares(x, dilations, *map(torch.from_numpy, (chosen, KERNELS[:, None], offsets))).numpy()
    mean, spread = found.mean(axis=0), found.std(axis=0) + 1e-2
    spread[-channels:] = 1
    values, vectors = np.linalg.eigh(np.cov((found - mean) / spread, rowvar=False))
    width = min(feature_dim, len(values))
    values, vectors = values[::-1][:width], vectors[:, ::-1][:, :width]
    components = vectors / np.maximum(values, 1e-9) ** 0.25 / spread[:, None]
    components *= np.sign(np.take_along_axis(components, np.abs(components).argmax(axis=0)[None], axis=0))
    scale = np.abs(components).max(axis=0) / 127
    rounded = np.rint(components / scale)
    return _Drawn(dilations, chosen, offsets, rounded.astype(np.int8), scale, -(mean @ rounded) * scale)
