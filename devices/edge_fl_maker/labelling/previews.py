"""What the label page shows of a recording: its curves or its spectrogram as an SVG with axes, in the size and colours of the page.

The SVG has no size of its own: places are percents of the element that shows it, text keeps its size, and lines their width.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import threading
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import UnusableFileError

Values = NDArray[np.floating[Any]]
KEPT = 8
"""Previews in memory, of at most about 200 kB each: those of the file on a screen and of the next ones, on two pages."""
COLUMNS = 500
"""Of a long curve, each with its least and its greatest value, and of a spectrogram, each with its greatest levels."""
MOST_LINES = 12
OWN_AXES = 6
"""Channels without units up to which each has an axis of its own; those of one unit share one."""
GAP = 4.5
"""Median steps between two values from which on no line joins them."""
SPAN = 0.6
"""Levels of a spectrogram below the loudest that are told apart: 60 dB; a sound below -40 dB of full scale stays faint."""
FRAMES = 1000
GREYS = 64
MOST_TICKS = 6
LEFT, WIDTH, TOP, BOTTOM = 11, 85, 6, 93
"""Place of the panels, in percent."""
SHIFT_PX = 8
"""By which all is moved down, so that the names above the first panel have room in a low element, too."""
ROW, ROW_LETTERS = 7, 40
"""Height of a row of names in percent, and letters after which the next one begins."""
SIDE = 1000
"""Units of a panel in both directions."""
STYLE = """text{font:12px system-ui,sans-serif;fill:#5c6670}path{fill:none;stroke-width:1.5px;vector-effect:non-scaling-stroke}
.axis{stroke:#c9d0d6;stroke-width:1px}
@media(prefers-color-scheme:dark){text{fill:#a3adb6}.axis{stroke:#3c454d}image{filter:invert(1)}}"""
COLOURS = ("#0b63c5", "#b3261e", "#1b7f4b", "#8a4b00", "#7b3fb5", "#5c6670")
DARK = ("#6cb0ff", "#ff8a80", "#6fd39a", "#f0b35e", "#c9a2f5", "#a3adb6")


class Preview(NamedTuple):
    """An SVG, what it shows in words, such as "6 channels, 4.0 s", and remarks on the recording's quality."""

    image: bytes
    about: str
    remarks: tuple[str, ...]


@lru_cache(KEPT)
def of(path: Path, version: bytes, kind: Kind, input: InputSpec | None, lock: threading.Lock) -> Preview:
    """Return the preview of a recording with this version of its file, read while `lock` is held. Raises UnusableFileError."""
    if kind == "audio":
        from edge_fl.modalities import audio

        rate = input.rate if input else audio.RATE
        with lock:
            sound, remarks = audio.recording(path, rate)
            return Preview(spectrogram(sound, rate), f"{len(sound) / rate:.1f} s of sound", remarks)
    if kind != "series":
        raise UnusableFileError(path, "not a recording")
    from edge_fl.modalities import series

    with lock:
        remarks = series.read(path, input).remarks  # and whether it has a window
        times, values, rate, _ = series.recorded(path, input)
    if not len(times):
        raise UnusableFileError(path, "no complete row")
    if (np.diff(times) < 0).any():  # the clock jumps back
        times = np.arange(len(times)) / rate
    about = f"{len(values)} channel{'s' * (len(values) > 1)}, {times[-1] - times[0] + 1 / rate:.1f} s"
    if len(values) > MOST_LINES:
        about += f"; the first {MOST_LINES} are drawn"
    names, units = (input.names, input.units) if input else ((), ())
    return Preview(curves(times, values, names, units), about, remarks)


def sound(path: Path, input: InputSpec | None) -> bytes:
    """Return an audio recording as a WAV file, mono at the rate of the input. Raises UnusableFileError."""
    from edge_fl.modalities import audio

    rate = input.rate if input else audio.RATE
    return audio.wav(audio.recording(path, rate)[0], rate)


def curves(times: NDArray[np.float64], values: Values, names: Sequence[str], units: Sequence[str]) -> bytes:
    """Return an SVG of values [C, n] at increasing times [n]; channels of one unit share a panel."""
    count = min(len(values), MOST_LINES)
    names, units = names or [f"channel {number + 1}" for number in range(count)], units or [""] * count
    panels: dict[object, list[int]] = {}
    for number in range(count):
        panels.setdefault(units[number] or (number if count <= OWN_AXES else ""), []).append(number)
    seconds = float(times[-1] - times[0]) * len(times) / max(len(times) - 1, 1) or 1.0
    x, height, drawn = SIDE * (times - times[0]) / seconds, (BOTTOM - TOP) / len(panels), list[str]()
    for place, members in enumerate(panels.values()):
        low, high = float(values[members].min()), float(values[members].max())
        if low == high:
            low, high = low - max(1, abs(low)), high + max(1, abs(high))
        lines = "".join(_line(x, SIDE * (high - values[number]) / (high - low), number) for number in members)
        zero = f"M0,{SIDE * high / (high - low):.0f}H{SIDE}" * (low < 0 < high)
        content = f'<path class="axis" d="M0,0V{SIDE}H{SIDE}{zero}"/>{lines}'
        legend = [(names[number], number) for number in members]
        drawn.append(_panel(TOP + place * height, height, content, (low, high), legend, units[members[0]]))
    return _svg(drawn, seconds)


def spectrogram(sound: Values, rate: float) -> bytes:
    """Return an SVG of the log-mel spectrogram of a sound [T]."""
    from edge_fl.modalities import audio

    frame, step = audio.frames_at(rate)
    blocks = [
        audio.spectrogram(sound[start : start + FRAMES * step + frame - step], rate)
        for start in range(0, len(sound), FRAMES * step)
    ]
    levels = np.concatenate(blocks, axis=1)
    count = levels.shape[1]
    starts = np.linspace(0, count, min(count, COLUMNS), endpoint=False).astype(np.int64)
    levels = np.maximum.reduceat(levels, starts, axis=1)[::-1]
    shares = np.clip((max(float(levels.max()), SPAN) - levels) / SPAN, 0, 1)
    encoded = base64.b64encode(_png(shares)).decode()
    image = f'<image width="{SIDE}" height="{SIDE}" preserveAspectRatio="none" href="data:image/png;base64,{encoded}"/>'
    panel = _panel(TOP, BOTTOM - TOP, image, (0, rate / 2000), (), "kHz, mel")
    return _svg([panel], len(sound) / rate)


def _line(x: NDArray[np.float64], y: Values, number: int) -> str:
    if len(x) > 2 * COLUMNS:
        starts = np.flatnonzero(np.diff((x * COLUMNS / SIDE).astype(np.int64), prepend=-1))
        ends = [each.reduceat(y, starts) for each in (np.minimum, np.maximum)]
        x, y = x[starts].repeat(2), np.stack(ends, axis=1).reshape(-1)
    steps = np.diff(x, prepend=x[0])
    is_start = steps > GAP * np.median(steps[steps > 0]) if steps.any() else steps > 0
    is_start[0] = True
    points = zip(np.where(is_start, "M", "L"), x, y, strict=True)
    content = "".join(f"{command}{a:.0f},{b:.0f}" for command, a, b in points)
    return f'<path class="c{number % len(COLOURS)}" d="{content}"/>'


def _panel(
    top: float,
    height: float,
    content: str,
    ends: tuple[float, float],
    legend: Iterable[tuple[str, int]],
    unit: str,
) -> str:
    """A vertical axis with its `content` and its `ends`, and above it the names of the lines in their colours, and the unit."""
    rows, letters = [""], 0
    for name, number in legend:
        if letters > ROW_LETTERS:
            rows, letters = [*rows, ""], 0
        rows[-1] += f'<tspan class="t{number % len(COLOURS)}">{_safe(name)}</tspan> '
        letters += len(name) + 1
    rows[-1] += _safe(f"({unit})") if unit else ""
    texts = [
        f'<text x="{LEFT}%" y="{top + ROW * row:.2f}%" dy="-4">{words}</text>'
        for row, words in enumerate(rows)
    ]
    top, bottom = top + ROW * (len(rows) - 1), top + height - ROW
    for y, value in ((top, ends[1]), (bottom, ends[0])):
        texts.append(f'<text x="{LEFT - 1}%" y="{y:.2f}%" text-anchor="end">{value:.3g}</text>')
    place = f'x="{LEFT}%" y="{top:.2f}%" width="{WIDTH}%" height="{bottom - top:.2f}%"'
    return (
        f'<svg {place} viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none">{content}</svg>{"".join(texts)}'
    )


def _svg(panels: Iterable[str], seconds: float) -> bytes:
    """The panels above an axis of time."""
    step = 10 ** math.floor(math.log10(seconds / MOST_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= MOST_TICKS)
    ticks = [
        f'<text x="{LEFT + WIDTH * number * step / seconds:.2f}%" y="{BOTTOM - ROW}%" dy="15" text-anchor="middle">'
        f"{number * step:g}{'' if number else ' s'}</text>"
        for number in range(int(seconds / step + 1e-9) + 1)
    ]
    light, dark = (
        "".join(f".c{n}{{stroke:{colour}}}.t{n}{{fill:{colour}}}" for n, colour in enumerate(colours))
        for colours in (COLOURS, DARK)
    )
    style = f"<style>{STYLE}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    shifted = f'<g transform="translate(0 {SHIFT_PX})">{"".join([*panels, *ticks])}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg">{style}{shifted}</svg>'.encode()


def _safe(name: str) -> str:
    """Text of a file for XML, which forbids some characters."""
    return html.escape("".join(each if each.isprintable() else "?" for each in name[:ROW_LETTERS]))


def _png(shares: NDArray[np.float64]) -> bytes:
    """Encode brightness 0..1 [H, W] as a grey PNG (RFC 2083)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    levels = (np.rint((GREYS - 1) * shares) * (65535 // (GREYS - 1))).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in levels)
    header = struct.pack(">2I5B", shares.shape[1], shares.shape[0], 16, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
