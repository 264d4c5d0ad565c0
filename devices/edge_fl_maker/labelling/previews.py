"""What the label page shows of a recording: its curves or its spectrogram as an SVG with axes, in the size and colours of the page.

The SVG has no size of its own: places are percents of the element that shows it, text keeps its size, and lines their width.
"""

from __future__ import annotations

import base64
import html
import itertools
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
from edge_fl.modalities import UnusableFileError, audio, series

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
MOST_TICKS = 6
LEFT, WIDTH, TOP, BOTTOM = 11, 85, 6, 93
"""Place of the panels, in percent."""
ROW, SHIFT_PX = 7, 8
"""Height of the names above a panel in percent, and by how much all is moved down to have room for them in a low element, too."""
LONGEST_NAME = 20
SIDE = 1000
"""Units of a panel in both directions."""
STYLE = """text{font:12px system-ui,sans-serif;fill:#5c6670}path{fill:none;stroke-width:1.5px;vector-effect:non-scaling-stroke}
.axis{stroke:#c9d0d6;stroke-width:1px}.end{text-anchor:end}.tick{text-anchor:middle}
@media(prefers-color-scheme:dark){text{fill:#a3adb6}.axis{stroke:#3c454d}image{filter:invert(1)}}"""
COLOURS = ("#2f81f7", "#d9534f", "#2e9e5b", "#b7791f", "#9b6bdb", "#7d8790")
"""Contrast of 3:1 or more with the light and the dark ground of the page."""


class Preview(NamedTuple):
    """An SVG, what it shows in words, such as "6 channels, 4.0 s", and remarks on the recording's quality."""

    image: bytes
    about: str
    remarks: tuple[str, ...]


@lru_cache(KEPT)
def of(path: Path, version: bytes, kind: Kind, input: InputSpec | None, lock: threading.Lock) -> Preview:
    """Return the preview of a recording with this version of its file, read while `lock` is held. Raises UnusableFileError."""
    if kind == "audio":
        rate = input.rate if input else audio.RATE
        with lock:
            x, found = audio.recording(path, rate)
            return Preview(spectrogram(x, rate), f"{len(x) / rate:.1f} s of sound", found)
    if kind != "series":
        raise UnusableFileError(path, "not a recording")
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
        margin = max(1, abs(low)) * (low == high)
        low, high = low - margin, high + margin
        lines = "".join(_line(x, SIDE * (high - values[number]) / (high - low), number) for number in members)
        zero = f"M0,{SIDE * high / (high - low):.0f}H{SIDE}" * (low < 0 < high)
        content = f'<path class="axis" d="M0,0V{SIDE}H{SIDE}{zero}"/>{lines}'
        words = [
            f'<tspan fill="{COLOURS[number % len(COLOURS)]}">●</tspan> {_safe(names[number])}'
            for number in members
        ]
        words += [_safe(f"({units[members[0]]})")] * bool(units[members[0]])
        drawn.append(_panel(TOP + place * height, height, content, (low, high), " ".join(words)))
    return _svg(drawn, seconds)


def spectrogram(sound: Values, rate: float) -> bytes:
    """Return an SVG of the log-mel spectrogram of a sound [T]."""
    frame, step = audio.frames_at(rate)
    edges = np.linspace(0, len(sound), min(COLUMNS, len(sound) // step + 1) + 1).astype(np.int64)
    parts = (sound[start : stop + frame - step] for start, stop in itertools.pairwise(edges))
    levels = np.stack([audio.spectrogram(part, rate).max(axis=1)[::-1] for part in parts], axis=1)
    encoded = base64.b64encode(_png((max(float(levels.max()), SPAN) - levels).clip(0, SPAN) / SPAN)).decode()
    image = f'<image width="{SIDE}" height="{SIDE}" preserveAspectRatio="none" href="data:image/png;base64,{encoded}"/>'
    return _svg([_panel(TOP, BOTTOM - TOP, image, (0, rate / 2000), "kHz, mel")], len(sound) / rate)


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
    return f'<path stroke="{COLOURS[number % len(COLOURS)]}" d="{content}"/>'


def _panel(top: float, height: float, content: str, ends: tuple[float, float], words: str) -> str:
    """A vertical axis with its `content`, its `ends`, and above it what is drawn, in words."""
    low, high = ends
    return (
        f'<svg x="{LEFT}%" y="{top:.2f}%" width="{WIDTH}%" height="{height - ROW:.2f}%" viewBox="0 0 {SIDE} {SIDE}"'
        f' preserveAspectRatio="none">{content}</svg><text x="{LEFT}%" y="{top:.2f}%" dy="-4">{words}</text>'
        f'<text class="end" x="{LEFT - 1}%" y="{top:.2f}%">{high:.3g}</text>'
        f'<text class="end" x="{LEFT - 1}%" y="{top + height - ROW:.2f}%">{low:.3g}</text>'
    )


def _svg(panels: Iterable[str], seconds: float) -> bytes:
    """The panels above an axis of time."""
    step = 10 ** math.floor(math.log10(seconds / MOST_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= MOST_TICKS)
    ticks = [
        f'<text class="tick" x="{LEFT + WIDTH * number * step / seconds:.2f}%" y="{BOTTOM - ROW}%" dy="15">'
        f"{number * step:g}{'' if number else ' s'}</text>"
        for number in range(int(seconds / step + 1e-9) + 1)
    ]
    shifted = f'<g transform="translate(0 {SHIFT_PX})">{"".join([*panels, *ticks])}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{shifted}</svg>'.encode()


def _safe(name: str) -> str:
    """Text of a file for XML, which forbids some characters."""
    return html.escape("".join(each if each.isprintable() else "?" for each in name[:LONGEST_NAME]))


def _png(shares: NDArray[np.float64]) -> bytes:
    """Encode brightness 0..1 [H, W] as a grey PNG (RFC 2083)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        named = kind + content
        return struct.pack(">I", len(content)) + named + struct.pack(">I", zlib.crc32(named))

    levels = (np.rint(63 * shares) * 1040).astype(">u2")  # few levels take few bytes
    rows = b"".join(b"\0" + row.tobytes() for row in levels)
    header = struct.pack(">2I5B", shares.shape[1], shares.shape[0], 16, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
