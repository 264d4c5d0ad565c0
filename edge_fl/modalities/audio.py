"""Recordings as clips: read WAV and FLAC, mix to mono, resample, and cut into clips of an extractor's input.

WAV files of whole and floating-point numbers are read here, so that every machine has the same values; the package soundfile (extra
[audio]) reads FLAC and coded WAV. A recording is read in blocks; its mono values are in memory once at its own rate and once at that of
the clips.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edge_fl.errors import DataError
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import (
    Reading,
    Source,
    UnusableFileError,
    columns,
    opened,
    require_kind,
    require_memory,
)
from edge_fl.modalities.limits import FULL_BITS, LIMITS, FileLimits
from edge_fl.seeds import generator

Floats = NDArray[np.float32]
RATE = 16_000.0
SHORTEST_S, LONGEST_S = 1.0, 3.0
"""Length of proposed clips in seconds."""
RATES, MAX_CHANNELS = range(1000, 1_000_001), 64
MAX_PHASES = 1000  # of resampling: an odd rate counts as one at most 0.1 % away
FLAC_ADVICE = "needs pip install 'edge-fl[audio]'"
BLOCK = 2**18  # values of time per step
ZEROS, KAISER, PASSED = 16, 8.0, 0.94
"""Resampling: zero crossings of the sinc on each side, shape of its window, cutoff as a share of the lower Nyquist frequency."""
CLIPPED, FULL = 0.002, 0.99
"""Share of values that repeat the one before at full scale, from which a recording is clipped."""
SILENT = 1e-3
"""Largest value of a silent recording: -60 dB of full scale."""
BLOCKS, STEP_BLOCKS, BANDS = 16, 5, 40
"""A log-mel spectrogram: its frames and the steps between them in blocks of 2 ms (at 16 kHz 512 and 160 values), and its mel bands."""
FLOOR_DB = -100.0
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_DTYPES = {(_PCM, 1): "u1", (_PCM, 2): "<i2", (_PCM, 3): "u1", (_PCM, 4): "<i4", (_FLOAT, 4): "<f4", (_FLOAT, 8): "<f8"}  # fmt: skip
_STREAMED = 0x7FFF_0000  # sizes from here on were not known when the header was written


class Header(NamedTuple):
    """What the header of a recording says: values per second, channels, values per channel."""

    rate: int
    channels: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate

    def memory(self, rate: float) -> float:
        """Bytes that the values take at their own rate, and at `rate` once and in clips that overlap by half."""
        return 4 * (self.frames + 3 * self.seconds * rate)


fit, input_of = columns.fit, columns.input_of


def arrays(x: Array, where: str) -> Floats:
    """Convert mono clips [N, T] to float32, from floats in -1..1 or from int16 or int32. Raises DataError, which begins with `where`."""
    if x.ndim != 2 or x.dtype.str[1:] not in ("i2", "i4", "f4", "f8"):
        raise DataError(f"{where}: clips are {x.dtype} {list(x.shape)}, expected float32 or int16 [N, T]")
    if x.dtype.kind == "i":
        return (x / -float(np.iinfo(x.dtype).min)).astype(np.float32)
    if x.size and not (x.min() >= -1 and x.max() <= 1):  # NaN fails both comparisons
        raise DataError(f"{where}: clips range over {x.min():g}..{x.max():g}, expected -1..1")
    return x.astype(np.float32, copy=False)


def propose(files: Sequence[Path], window_s: float = 0.0, rate: float = 0.0) -> InputSpec:
    """Return the input for recordings: clips of `window_s` seconds at `rate` Hz, which start every half clip.

    0: 16 kHz, and as many seconds as the median of the recordings that can be read, within 1 to 3.
    """
    lengths = [0.0]
    for path in () if window_s else files:
        with suppress(UnusableFileError):  # a skip, with its reason, once it is read
            lengths.append(header(path).seconds)
    rate, typical = rate or RATE, np.median(lengths[1:] or lengths)
    window = round((window_s or float(np.clip(typical, SHORTEST_S, LONGEST_S))) * rate)
    return InputSpec((window,), (0.0,), (1.0,), "T", "float32", rate=rate, hop=max(1, window // 2))


def check(path: Path, limits: FileLimits = LIMITS) -> None:
    """Read the header of a recording. Raises UnusableFileError as `read`, apart from damage behind the header."""
    require_memory(path, header(path).memory(RATE), limits)


def header(path: Source) -> Header:
    """Return what the header of a recording says. Raises UnusableFileError."""
    with _sound(path) as (found, _):
        return found


def read(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the clips [n, T] of a recording; without `input` all of it, at 16 kHz, as one sample. Raises UnusableFileError."""
    if input is None:
        x, remarks = recording(path, RATE, limits)
        return Reading(x[None], remarks)
    require_kind(input, "audio", "recording")
    x, remarks = recording(path, input.rate, limits)
    if len(x) < input.window:
        remarks += (f"shorter than a clip of {input.window / input.rate:.3g} s: padded",)
    return Reading(clips(x, input), remarks)


def recording(
    path: Source, rate: float = RATE, limits: FileLimits = LIMITS
) -> tuple[Floats, tuple[str, ...]]:
    """Return a recording [T], mono at `rate` Hz in -1..1, and remarks on its quality. Raises UnusableFileError."""
    with _sound(path) as (found, blocks):
        require_memory(path, found.memory(rate), limits)
        x, count, flat, largest = np.empty(found.frames, np.float32), 0, 0, 0.0
        for block in blocks:
            if not np.isfinite(block).all():
                raise UnusableFileError(path, "values that are not finite")
            block = block.clip(-1, 1)
            sizes = np.abs(block)
            flat += int(((sizes[1:] >= FULL) & (block[1:] == block[:-1])).sum())
            largest = max(largest, float(sizes.max(initial=0)))
            x[count : count + len(block)] = block.mean(1)
            count += len(block)
        if count < found.frames:
            raise EOFError
    share = flat / count / found.channels
    remarks = {
        f"{found.channels} channels: mixed to one": found.channels > 1,
        "clipped": share > CLIPPED,
        "silent": largest < SILENT,
        f"{found.rate} Hz, resampled to {rate:g} Hz": found.rate != rate,
    }
    return resampled(x, found.rate, rate), tuple(remark for remark, holds in remarks.items() if holds)


def clips(x: Floats, input: InputSpec) -> Floats:
    """Cut a recording [T] at the input's rate into clips [n, window], one every `hop`, as a view; at least one, padded if it is shorter.

    What is left at the end becomes a padded clip if it has at least half a hop, or half a clip, of new values.
    """
    window, hop = input.window, input.hop
    whole = max(0, (len(x) - window) // hop + 1)
    left = len(x) - max(whole * hop, (whole - 1) * hop + window) if whole else len(x)
    count = whole + (not whole or left >= min(hop, window) / 2)
    padding = (count - 1) * hop + window - len(x)
    return sliding_window_view(np.pad(x, (0, padding)) if padding > 0 else x, window)[::hop][:count]


def resampled(x: Floats, rate: float, target: float) -> Floats:
    """Resample values [T] from `rate` to `target` Hz with a sinc in a Kaiser window, phase by phase; the first value stays the first."""
    if rate == target:
        return x
    down, up = (Fraction(rate) / Fraction(target)).limit_denominator(MAX_PHASES).as_integer_ratio()
    cutoff = PASSED * min(1.0, up / down)
    half = math.ceil(ZEROS / cutoff)
    windows = sliding_window_view(np.pad(x, half), 2 * half)
    out = np.empty(-(-len(x) * up // down), np.float32)
    for phase in range(min(up, len(out))):
        start, rest = divmod(phase * down, up)
        times = np.arange(1 - half, half + 1) - rest / up
        kernel = np.sinc(cutoff * times) * np.i0(KAISER * np.sqrt(np.maximum(1 - (times / half) ** 2, 0)))
        found = out[phase::up]
        found[:] = windows[start + 1 :: down][: len(found)] @ (kernel / kernel.sum()).astype(np.float32)
    return out.clip(-1, 1)


def synthetic(input: InputSpec, count: int, seed: int) -> Floats:
    """Clips [N, T] of pink noise with three tones that rise and fall, of various loudness."""
    rng, length = generator(seed, "release.synthetic"), input.window
    spectrum = np.fft.rfft(rng.standard_normal((count, length)))
    pink = np.fft.irfft(spectrum / np.sqrt(np.arange(spectrum.shape[1]) + 1), n=length)
    pink /= np.abs(pink).max(1, keepdims=True) + 1e-9
    seconds = np.arange(length) / input.rate
    pitch = np.exp(rng.uniform(math.log(80), math.log(0.4 * input.rate), (count, 3, 1)))
    swell = np.sin(np.pi * (np.arange(length) / length + rng.random((count, 3, 1)))) ** 2
    tones = (swell * np.sin(2 * np.pi * pitch * seconds)).mean(1)
    loudness = 10 ** rng.uniform(-2, 0, (count, 1))
    return np.asarray(loudness * (0.5 * pink + 0.5 * tones), np.float32)


def spectrogram(x: Floats, rate: float) -> Floats:
    """Log-mel levels [BANDS, frames] of a clip [T], lowest band first: 0 is -100 dB of full scale or less, 1 is full scale."""
    frame, step = frames_at(rate)
    windows = sliding_window_view(np.pad(x, (0, max(0, frame - len(x)))), frame)[::step]
    window = np.hanning(frame + 1)[:-1]
    power = np.square(np.abs(np.fft.rfft(windows * window, axis=1)) * 2 / window.sum())
    db = 10 * np.log10(power @ mel_filters(rate, frame, power.shape[1]) + 10 ** (FLOOR_DB / 10))
    return np.asarray((1 - db.T / FLOOR_DB).clip(0, 1), np.float32)


def frames_at(rate: float) -> tuple[int, int]:
    """Values per frame of a spectrogram and between frames."""
    block = max(1, round(rate / 500))
    return BLOCKS * block, STEP_BLOCKS * block


def mel_filters(rate: float, frame: int, bins: int) -> Floats:
    """Weights [bins, BANDS] of triangular bands, equally wide in mel = 2595 log10(1 + f / 700), up to half the rate."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    frequencies = np.arange(bins)[:, None] * rate / frame
    rising, falling = frequencies - edges[:-2], edges[2:] - frequencies
    weights = np.minimum(rising / np.diff(edges)[:-1], falling / np.diff(edges)[1:])
    return np.asarray(weights.clip(0), np.float32)


def wav(x: Floats, rate: float) -> bytes:
    """Encode mono values [T] in -1..1 as a 16-bit WAV file."""
    data: bytes = np.rint(x.clip(-1, 1) * 32767).astype("<i2").tobytes()
    form = (b"fmt ", 16, _PCM, 1, round(rate), 2 * round(rate), 2, 16)
    sizes = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", *form, b"data", len(data))
    return sizes + data


@contextmanager
def _sound(path: Source) -> Iterator[tuple[Header, Iterator[Floats]]]:
    """Open a recording: its header and its values in blocks [n, channels]; whatever is raised inside is a UnusableFileError."""
    with opened(path) as file:
        start = file.read(12)
        is_wav = start[:4] == b"RIFF" and start[8:] == b"WAVE"
        if not is_wav and start[:4] not in (b"fLaC", b"RF64"):
            raise UnusableFileError(path, "not a WAV or FLAC file" if start else "empty")
        found, blocks = (is_wav and _wav(file)) or _by_soundfile(path, file)
        if found.rate not in RATES or not 0 < found.channels <= MAX_CHANNELS:
            raise UnusableFileError(path, "damaged", f"{found.rate} Hz, {found.channels} channels")
        if not found.frames:
            raise UnusableFileError(path, "empty")
        yield found, blocks


def _wav(file: BinaryIO) -> tuple[Header, Iterator[Floats]] | None:
    """Header and values of a WAV file behind its first 12 bytes; None for coded values. Raises EOFError if it is truncated."""
    form, end, place = b"", file.seek(0, 2), 12
    while True:
        file.seek(place)
        name, size = struct.unpack("<4sI", _exactly(file, 8))
        place += 8
        if name == b"data":
            break
        if name == b"fmt ":
            form = _exactly(file, min(size, 40))
        place += size + size % 2
    codec, channels, rate, _, align, _ = struct.unpack_from("<HHIIHH", form)
    if codec == _EXTENSIBLE and len(form) >= 26:
        codec = struct.unpack_from("<H", form, 24)[0]  # the first bytes of the sub-format
    width = align // max(1, channels)
    if (codec, width) not in _DTYPES:
        return None
    size = end - place if size == 0 or size >= _STREAMED else size
    if size > end - place:
        raise EOFError
    found = Header(rate, channels, size // align)
    return found, _values(file, found, _DTYPES[codec, width], width)


def _values(file: BinaryIO, found: Header, dtype: str, width: int) -> Iterator[Floats]:
    for start in range(0, found.frames, BLOCK):
        count = min(BLOCK, found.frames - start)
        x: Array = np.frombuffer(_exactly(file, count * found.channels * width), dtype)
        if width == 3:  # into the upper bytes of 32 bits
            x = np.pad(x.reshape(-1, 3), ((0, 0), (1, 0))).view("<i4")
        if x.dtype.kind != "f":
            x = x / np.float32(2 ** (8 * x.itemsize - 1)) - (x.itemsize == 1)
        yield x.reshape(count, found.channels).astype(np.float32)


def _exactly(file: BinaryIO, count: int) -> bytes:
    if len(found := file.read(count)) < count:
        raise EOFError
    return found


def _by_soundfile(path: Source, file: BinaryIO) -> tuple[Header, Iterator[Floats]]:
    try:
        soundfile: Any = importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise UnusableFileError(path, FLAC_ADVICE) from error
    file.seek(0)
    sound = soundfile.SoundFile(file)
    blocks = (sound.read(BLOCK, "float32", always_2d=True) for _ in range(0, sound.frames, BLOCK))
    return Header(sound.samplerate, sound.channels, sound.frames), blocks
