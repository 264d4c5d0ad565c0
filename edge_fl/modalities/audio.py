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
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from msgspec import structs
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edge_fl.errors import DataError, brief
from edge_fl.files.folder import unusable
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, SIDE, Reading, Thumbnails, UnusableFileError, cells, rounded
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
FRAME, STEP, BANDS = 512, 160, 40
"""A log-mel spectrogram at 16 kHz: values per frame and between frames, in proportion at other rates; mel bands."""
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


def arrays(x: Array, where: str) -> Floats:
    """Convert mono clips [N, T] to float32, from floats in -1..1 or int16 and int32 in their full range.

    Raises DataError, which begins with `where`.
    """
    if x.ndim != 2 or (x.dtype.kind != "f" and x.dtype not in (np.int16, np.int32)):
        raise DataError(
            f"{where}: clips are {x.dtype} {list(x.shape)}, expected mono float32 or int16 [N, T]"
        )
    if x.dtype.kind == "i":
        return (x / -float(np.iinfo(x.dtype).min)).astype(np.float32)
    if x.size and not (x.min() >= -1 and x.max() <= 1):  # NaN fails both comparisons
        raise DataError(f"{where}: clips range over {x.min():g}..{x.max():g}, expected -1..1")
    return x.astype(np.float32, copy=False)


def fit(x: Floats, input: InputSpec, where: object = "clips") -> Floats:
    """Return clips [N, T] in the length of `input`; shorter ones are padded with zeros. Raises DataError, which begins with `where`."""
    _require_audio(input, where)
    if x.shape[1] > input.window:
        raise DataError(
            f"{where}: clips of {x.shape[1]} values, the extractor takes {input.window} at {input.rate:g} Hz; cut the recordings again"
        )
    return np.pad(x, ((0, 0), (0, input.window - x.shape[1]))) if x.shape[1] < input.window else x


def input_of(x: Floats, rows: NDArray[np.int64], given: InputSpec | None = None) -> InputSpec:
    """Return the input of clips [N, T], with mean and std of the values at `rows`; else as `given`, without it at 16 kHz."""
    total = squares = 0.0
    for row in rows:
        values = x[row].astype(np.float64)
        total, squares = total + values.sum(), squares + np.square(values).sum()
    count = max(1, len(rows) * x.shape[1])
    mean = total / count
    std = math.sqrt(max(squares / count - mean**2, SILENT**2))  # silence is not divided by zero
    input = given or _spec(x.shape[1], RATE)
    return structs.replace(
        input, shape=x.shape[1:], mean=rounded(np.array([mean])), std=rounded(np.array([std]))
    )


def propose(files: Sequence[Path], window_s: float = 0.0, rate: float = 0.0) -> InputSpec:
    """Return the input for recordings: clips of `window_s` seconds at `rate` Hz, which start every half clip.

    0: 16 kHz, and as many seconds as the median of the recordings that can be read, within 1 to 3.
    """
    if not window_s:
        lengths = []
        for path in files:
            try:
                lengths.append(header(path).seconds)
            except UnusableFileError:  # a skip, with its reason, once it is read
                continue
        window_s = float(np.clip(np.median(lengths or [0.0]), SHORTEST_S, LONGEST_S))
    return _spec(round(window_s * (rate or RATE)), rate or RATE)


def check(path: Path, limits: FileLimits = LIMITS) -> None:
    """Read the header of a recording. Raises UnusableFileError as `read`, apart from damage behind the header."""
    _require_affordable(path, header(path), RATE, limits)


def header(path: Path | BinaryIO) -> Header:
    """Return what the header of a recording says. Raises UnusableFileError."""
    with _opened(path) as (found, _):
        return found


def read(
    path: Path | BinaryIO, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the clips [n, T] of a recording; without `input` all of it, at 16 kHz, as one sample. Raises UnusableFileError."""
    if input:
        _require_audio(input, "recording")
    rate = input.rate if input else RATE
    x, remarks = recording(path, rate, limits)
    if input is None:
        return Reading(x[None], remarks)
    if len(x) < input.window:
        remarks = (*remarks, f"shorter than a clip of {input.window / rate:.3g} s: padded")
    return Reading(clips(x, input), remarks)


def recording(
    path: Path | BinaryIO, rate: float = RATE, limits: FileLimits = LIMITS
) -> tuple[Floats, tuple[str, ...]]:
    """Return a recording [T], mono at `rate` Hz in -1..1, and remarks on its quality. Raises UnusableFileError."""
    with _opened(path) as (found, blocks):
        _require_affordable(path, found, rate, limits)
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
            raise UnusableFileError(path, "truncated")
    remarks = [f"{found.channels} channels: mixed to one"] if found.channels > 1 else []
    if flat > CLIPPED * count * found.channels:
        remarks.append(f"clipped: {flat / count / found.channels:.1%} of its values")
    if largest < SILENT:
        remarks.append("silent")
    if found.rate != rate:
        remarks.append(f"{found.rate} Hz, resampled to {rate:g} Hz")
    return resampled(x, found.rate, rate), tuple(remarks)


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
    return (loudness * (0.5 * pink + 0.5 * tones)).astype(np.float32)


def thumbnails(x: Floats) -> Thumbnails:
    """Clips [n, T] -> SIDE bands of their spectrogram at SIDE times, uint8 [n, SIDE²]."""
    found = np.empty((len(x), SIDE * SIDE), np.uint8)
    for row, clip in enumerate(x):
        levels = spectrogram(clip, RATE)
        coarse = cells(levels.shape[0]) @ levels @ cells(levels.shape[1]).T
        found[row] = np.rint(255 * coarse).reshape(-1).astype(np.uint8)
    return found


def side(x: Floats) -> int:
    """Return 0: clips have no sides."""
    return 0


def spectrogram(x: Floats, rate: float) -> Floats:
    """Log-mel levels [BANDS, frames] of a clip [T], lowest band first: 0 is -100 dB of full scale or less, 1 is full scale."""
    frame, step = frames_at(rate)
    windows = sliding_window_view(np.pad(x, (0, max(0, frame - len(x)))), frame)[::step]
    window = np.hanning(frame + 1)[:-1]
    power = np.square(np.abs(np.fft.rfft(windows * window, axis=1)) * 2 / window.sum())
    db = 10 * np.log10(power @ mel_filters(rate, frame) + 10 ** (FLOOR_DB / 10))
    levels: Floats = (1 - db.T / FLOOR_DB).clip(0, 1).astype(np.float32)
    return levels


def frames_at(rate: float) -> tuple[int, int]:
    """Values per frame of a spectrogram, an even number, and between frames."""
    return max(8, 2 * round(FRAME / 2 * rate / RATE)), max(1, round(STEP * rate / RATE))


def mel_filters(rate: float, frame: int, bands: int = BANDS) -> Floats:
    """Weights [frame // 2 + 1, bands] of triangular bands, equally wide in mel = 2595 log10(1 + f / 700), up to half the rate."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    frequencies = np.arange(frame // 2 + 1)[:, None] * rate / frame
    rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
    weights: Floats = np.minimum(rising, falling).clip(0).astype(np.float32)
    return weights


def wav(x: Floats, rate: float) -> bytes:
    """Encode mono values [T] in -1..1 as a 16-bit WAV file."""
    data: bytes = np.rint(x.clip(-1, 1) * 32767).astype("<i2").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, _PCM, 1, round(rate), 2 * round(rate), 2, 16)
    start = struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
    return start + form + struct.pack("<4sI", b"data", len(data)) + data


def _spec(window: int, rate: float) -> InputSpec:
    hop = max(1, window // 2)
    return InputSpec((window,), (0.0,), (1.0,), axes="T", dtype="float32", rate=rate, hop=hop)


def _require_audio(input: InputSpec, where: object) -> None:
    if input.kind != "audio":
        raise DataError(f"{where}: audio, but the extractor takes {ABOUT[input.kind].samples} ({input.kind})")


def _require_affordable(path: Path | BinaryIO, found: Header, rate: float, limits: FileLimits) -> None:
    second_bytes = 4 * (found.rate + rate)
    if found.seconds * second_bytes > limits.decoding_bytes:
        most = limits.decoding_bytes / second_bytes / 60
        detail = (
            f"{found.seconds / 60:.0f} min at {found.rate} Hz, this board allows {most:.0f} min: split it"
        )
        raise UnusableFileError(path, "too large for this board", detail)


@contextmanager
def _opened(path: Path | BinaryIO) -> Iterator[tuple[Header, Iterator[Floats]]]:
    """Open a recording: its header and its values in blocks [n, channels]; whatever is raised inside is a UnusableFileError."""
    if isinstance(path, Path) and (reason := unusable(path)):
        raise UnusableFileError(path, reason, passing=True)
    try:
        with path.open("rb") if isinstance(path, Path) else nullcontext(path) as file:
            file.seek(0)
            start = file.read(12)
            if not start:
                raise UnusableFileError(path, "empty")
            is_wav = start[:4] == b"RIFF" and start[8:] == b"WAVE"
            if not is_wav and start[:4] not in (b"fLaC", b"RF64"):
                raise UnusableFileError(path, "not a WAV or FLAC file")
            found, blocks = (is_wav and _wav(file)) or _by_soundfile(path, file)
            if found.rate not in RATES or not 0 < found.channels <= MAX_CHANNELS:
                raise UnusableFileError(path, "damaged", f"{found.rate} Hz, {found.channels} channels")
            if not found.frames:
                raise UnusableFileError(path, "empty")
            yield found, blocks
    except UnusableFileError:
        raise
    except MemoryError as error:
        raise UnusableFileError(path, "out of memory", passing=True) from error
    except EOFError as error:
        raise UnusableFileError(path, "truncated") from error
    except OSError as error:
        if error.errno is None:
            raise UnusableFileError(path, "damaged", brief(error)) from error
        raise UnusableFileError(path, (error.strerror or "cannot be read").lower(), passing=True) from error
    except Exception as error:  # of a decoder, of any type
        raise UnusableFileError(path, "damaged", brief(f"{type(error).__name__}: {error}")) from error


def _wav(file: BinaryIO) -> tuple[Header, Iterator[Floats]] | None:
    """Header and values of a WAV file behind its first 12 bytes; None for coded values. Raises EOFError if it is truncated."""
    end = file.seek(0, 2)
    place, form = 12, b""
    while True:
        file.seek(place)
        name, size = struct.unpack("<4sI", _exactly(file, 8))
        if name == b"data":
            break
        if name == b"fmt ":
            form = _exactly(file, min(size, 40))
        place += 8 + size + size % 2
    codec, channels, rate, _, align, _ = struct.unpack_from("<HHIIHH", form)
    if codec == _EXTENSIBLE and len(form) >= 26:
        codec = struct.unpack_from("<H", form, 24)[0]  # the first bytes of the sub-format
    width = align // max(1, channels)
    if (codec, width) not in _DTYPES:
        return None
    size = end - place - 8 if size == 0 or size >= _STREAMED else size
    if size > end - place - 8:
        raise EOFError
    return Header(rate, channels, size // align), _values(
        file, _DTYPES[codec, width], width, channels, size // align
    )


def _values(file: BinaryIO, dtype: str, width: int, channels: int, frames: int) -> Iterator[Floats]:
    for start in range(0, frames, BLOCK):
        count = min(BLOCK, frames - start)
        x: Array = np.frombuffer(_exactly(file, count * channels * width), dtype)
        if width == 3:  # into the upper bytes of 32 bits
            wide = np.zeros((len(x) // 3, 4), np.uint8)
            wide[:, 1:] = x.reshape(-1, 3)
            x = wide.view("<i4")
        if x.dtype.kind != "f":
            x = x / np.float32(2 ** (8 * x.itemsize - 1)) - (x.itemsize == 1)
        yield x.reshape(count, channels).astype(np.float32)


def _exactly(file: BinaryIO, count: int) -> bytes:
    if len(found := file.read(count)) < count:
        raise EOFError
    return found


def _by_soundfile(path: Path | BinaryIO, file: BinaryIO) -> tuple[Header, Iterator[Floats]]:
    try:
        soundfile: Any = importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise UnusableFileError(path, FLAC_ADVICE) from error
    file.seek(0)
    sound = soundfile.SoundFile(file)
    return Header(sound.samplerate, sound.channels, sound.frames), _sounds(sound)


def _sounds(sound: Any) -> Iterator[Floats]:
    while len(block := sound.read(BLOCK, "float32", always_2d=True)):
        yield block
