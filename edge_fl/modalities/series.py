"""Series: recordings of sensors, cut into windows of several channels. A file is one recording, and its windows are one group.

A column of times is found by its name. Rows are brought to the rate of the input: linearly interpolated, and averaged before if there are
more of them. No window spans a place where the clock jumps back, or where values are missing for longer than LONG steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from edge_fl.errors import DataError, brief
from edge_fl.files.npz import Array
from edge_fl.files.paths import text
from edge_fl.inputs import InputSpec
from edge_fl.modalities import (
    Reading,
    Source,
    UnusableFileError,
    columns,
    require_kind,
    require_memory,
)
from edge_fl.modalities.columns import EMPTY, Columns, Numbers
from edge_fl.modalities.limits import FULL_BITS, LIMITS, FileLimits
from edge_fl.seeds import generator

Windows = NDArray[np.float32]
TOLERANCE = 0.01
"""Part by which the rate of a recording may differ from the input's without being resampled."""
GAP, LONG = 2.5, 4.5
"""Steps between two rows, in typical steps, above which rows are missing, and above which they are not interpolated."""
WINDOW_S, LEAST_WINDOW = 4.0, 16
"""Longest window that is proposed, in seconds, and its fewest values."""
CLIPPED = 0.01
"""Part of the values of a channel that are equal to its highest or lowest one, above which it seems to be clipped."""
SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "\u00b5s", "\u03bcs", "micros", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nanos", "nanoseconds"), 1e-9),
}
CLOCKS = {*SECONDS, *"time timestamp datetime date t ts epoch elapsed uptime zeit zeitstempel".split()}
_ASIDE = set("unix utc local logging system sample since start recording stamp".split())
_BETWEEN_WORDS = re.compile(r"[\s_.-]+|(?<=[a-z])(?=[A-Z])")
_EPOCH = (1.2e9, 2.6e9)  # seconds from 1970 to 2008 and 2052

check, fit, input_of = columns.check, columns.fit, columns.input_of


def arrays(x: Array, where: str) -> Windows:
    """Convert windows [N, C, T], or [N, T] of one channel, to float32. Raises DataError, which begins with `where`."""
    if x.ndim not in (2, 3):
        raise DataError(f"{where}: windows {list(x.shape)}, expected [N, C, T], or [N, T] of one channel")
    return columns.finite(x[:, None] if x.ndim == 2 else x, where)


def windows(x: Array, input: InputSpec) -> Array:
    """Cut values [C, n] at the input's rate into windows [k, C, T], a view; the rest at the end is in none."""
    if x.shape[1] < input.window:
        return np.empty((0, len(x), input.window), x.dtype)
    found = np.lib.stride_tricks.sliding_window_view(x, input.window, axis=1)
    return found[:, :: input.hop].transpose(1, 0, 2)


def read(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the windows [n, C, T] of a recording; without an input its columns of numbers, as one window. Raises UnusableFileError.

    bits: not used.
    """
    t, x, measured, remarks = recorded(path, input, limits)
    if input is None:
        return Reading(x[None].astype(np.float32))
    if abs(measured / input.rate - 1) > TOLERANCE:
        remarks.append(f"{measured:.3g} Hz, resampled to {input.rate:g} Hz")
    parts = _parts(t, measured, input.rate, remarks)
    length = sum(t[part][-1] - t[part][0] for part in parts) * input.rate
    require_memory(path, length * len(x) * (16 + 8 * input.window / input.hop), limits)
    pieces = [at_rate(t[part], x[:, part], measured, input.rate) for part in parts]
    found = np.concatenate(
        [np.empty((0, *input.shape), np.float32), *(windows(piece, input) for piece in pieces)]
    )
    if not len(found):
        longest, window = max((piece.shape[1] for piece in pieces), default=0), input.window
        seconds = f"{longest / input.rate:.4g} s without a gap, a window takes {window / input.rate:.4g} s"
        raise UnusableFileError(path, "shorter than a window", "; ".join([seconds, *remarks]))
    return Reading(found, tuple(remarks))


def recorded(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS
) -> tuple[Numbers, Numbers, float, list[str]]:
    """Return times [n] in seconds, the values [C, n] at them, their rate in Hz, and remarks on them. Raises UnusableFileError."""
    if input:
        require_kind(input, "series", "recording")
    sheet = columns.read(path, limits, input.channels if input else 0)
    t, clocks = _clock(sheet, input)
    x = sheet.values(input, clocks)
    remarks = list(_quality(x, input.names if input else ()))
    return (*_ordered(t, x, sheet.rate or (input.rate if input else 1.0), remarks), remarks)


class Description(NamedTuple):
    """Channels that a recording seems to have, with their units, its rate in Hz (0: it has no times), and its length in rows."""

    names: tuple[str, ...]
    units: tuple[str, ...]
    rate: float
    length: int


def describe(path: Path, limits: FileLimits = LIMITS) -> Description:
    """Describe a recording; its channels are all columns of numbers that are no times. Raises UnusableFileError."""
    sheet = columns.read(path, limits)
    t, clocks = _clock(sheet, None)
    found = sheet.numeric(clocks)
    rate = _ordered(t, np.empty((0, len(sheet.lines))), sheet.rate, [])[2]
    names = tuple(sheet.names[index] or f"{number}" for number, index in enumerate(found, 1))
    return Description(names, tuple(sheet.units[index] for index in found), rate, len(sheet.lines))


def propose(files: Sequence[Path], window_s: float | None = None, rate: float | None = None) -> InputSpec:
    """Return an input for recordings: the columns of most of them, their median rate, windows up to WINDOW_S that overlap by half.

    Raises UnusableFileError; DataError, which names the first file that lacks a column, or lacks times if there is no `rate`.
    """
    found = {path: describe(path) for path in files}
    names = columns.common({path: about.names for path, about in found.items()})
    for path, about in found.items():
        if not rate and not about.rate:
            raise DataError(
                f"{text(path)}: no column of times, such as 'time'; state the rate in Hz, as in --rate 50"
            )
    rate = rate or float(f"{np.median([about.rate for about in found.values()]):.3g}")
    shortest = float(np.quantile([about.length / (about.rate or rate) for about in found.values()], 0.1))
    values = rate * (window_s or min(WINDOW_S, shortest))
    window = max(1, round(values)) if window_s else max(LEAST_WINDOW, int(values // 10 * 10))
    units = {name: unit for about in found.values() for name, unit in zip(*about[:2], strict=True)}
    form = InputSpec((len(names), window), (0.0,), (1.0,), "CT", "float32", rate=rate, hop=-(-window // 2))
    return structs.replace(form, names=names, units=tuple(units[name] for name in names))


def synthetic(input: InputSpec, count: int, seed: int) -> Windows:
    """Windows [N, C, T] of a random walk and a sine in every channel, with the input's mean and std."""
    rng = generator(seed, "release.synthetic")
    walk = np.cumsum(rng.standard_normal((count, *input.shape)), axis=2)
    turns, phase = rng.uniform(0, 1, (2, count, input.channels, 1))
    time = np.linspace(0, max(2, input.window / 8), input.window)
    found = np.sin(2 * np.pi * (turns * time + phase))
    found += (walk - walk.mean(2, keepdims=True)) / np.maximum(walk.std(2, keepdims=True), 1e-9)
    mean, std = (np.broadcast_to(values, input.channels)[:, None] for values in (input.mean, input.std))
    return np.asarray(mean + std * found / np.sqrt(1.5), np.float32)


def _clock(sheet: Columns, input: InputSpec | None) -> tuple[Numbers | None, set[int]]:
    """Return the times of the rows in seconds, None if there are none, and the columns of times, which are no channel of the input.

    Of several the one with the most different times counts. A column without a name is one if it holds ISO 8601.
    """
    wanted = {columns.key(name) for name in (input.names if input else ())}
    times, clocks = list[Numbers](), set[int]()
    for index, (name, cells) in enumerate(zip(sheet.names, sheet.cells, strict=True)):
        # t is a time, T a temperature
        words = [word if len(word) == 1 else word.lower() for word in _BETWEEN_WORDS.split(name)]
        is_time = not CLOCKS.isdisjoint(words) and set(words) <= CLOCKS | _ASIDE
        if name.casefold() in wanted or (name and not is_time):
            continue
        if isinstance(cells, list):
            with suppress(ValueError):
                times.append(np.array(list(map(_iso, cells))))
                clocks.add(index)
        elif name:
            stated = next((SECONDS[word] for word in (sheet.units[index], *words) if word in SECONDS), None)
            numbers = np.where(np.abs(cells) < columns.LARGEST, cells, np.nan)
            times.append(numbers * (stated or _unit(numbers, input)))
        if name:
            clocks.add(index)
    if clocks and not times:
        cell = brief(sheet.cells[min(clocks)][0])
        detail = f"column {sheet.names[min(clocks)]}: {cell!r}, expected numbers or ISO 8601"
        raise UnusableFileError(sheet.source, "times of another form", detail)
    return max(times, key=lambda t: len(np.unique(t)), default=None), clocks


def _iso(cell: str) -> float:
    """Convert a date and time in ISO 8601, or a time of day, to seconds; without a time zone it counts as UTC."""
    if (cell := cell.strip()).lower() in EMPTY:
        return math.nan
    found = datetime.fromisoformat(f"1970-01-01T{cell}" if cell[2:3] == ":" else cell)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _unit(t: Numbers, input: InputSpec | None) -> float:
    """Return the unit of times in seconds: by their size since 1970, else by their step, near the rate of the input if there is one."""
    units, known = sorted(set(SECONDS.values()), reverse=True), t[np.isfinite(t)]
    step, middle = 1 / _rate(t), np.median(known) if len(known) else 0
    found = [unit for unit in units if _EPOCH[0] < middle * unit < _EPOCH[1]]
    if input and not found:
        return min(units, key=lambda unit: abs(math.log(step * unit * input.rate)))
    found += [unit for unit, most in zip(units, (5, 2e3, 1e6, math.inf), strict=True) if step < most]
    return found[0]


def _rate(t: Numbers) -> float:
    """Return the rows per unit of time: 1 divided by the mean of the steps that are no gaps; 1 if there is no step."""
    steps = np.abs(np.diff(t[np.isfinite(t)]))
    steps = steps[steps > 0]
    return 1 / float(np.mean(steps[steps <= GAP * np.median(steps)])) if len(steps) else 1.0


def _ordered(
    t: Numbers | None, x: Numbers, rate: float, remarks: list[str]
) -> tuple[Numbers, Numbers, float]:
    """Return times that increase, but for jumps back, the values x [C, n] at them, and their rate; without times rows are at `rate`."""
    if t is not None:
        if not (known := np.isfinite(t)).all():
            remarks.append("rows without a time are left out")
            t, x = t[known], x[:, known]
        same = np.diff(t) == 0
        changes = np.flatnonzero(~same)
        if 2 * same.sum() > len(same):  # a clock of whole seconds: their rows are counted
            remarks.append("most rows have the time of the row before: taken as evenly spaced")
            if len(changes) > 1:
                rate = float(np.median(np.diff(changes)) / np.median(np.abs(np.diff(t[changes]))))
            t = None
        elif len(t) > 1:
            if same.any():
                remarks.append("rows with the time of the row before are left out")
                t, x = t[np.append(True, ~same)], x[:, np.append(True, ~same)]
            rate = _rate(t)
    if t is None:
        t = np.arange(x.shape[1]) / (rate or 1.0)
    complete = np.isfinite(x).all(axis=0)
    return t[complete], x[:, complete], rate


def _parts(t: Numbers, measured: float, rate: float, remarks: list[str]) -> list[slice]:
    """Divide rows where the clock jumps back, and at gaps that are too long to interpolate."""
    steps = np.diff(t) * measured
    back, long = steps < 0, steps > LONG * max(1, measured / rate)
    if back.any():
        remarks.append("the clock jumps back: cut there")
    if (steps > GAP).any():
        remarks.append(f"gaps: {'cut at the long ones' if long.any() else 'interpolated'}")
    edges = [0, *(np.flatnonzero(back | long) + 1), len(t)]
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]


def at_rate(t: Numbers, x: Numbers, measured: float, rate: float) -> Windows:
    """Return the values [C, n] at a rate in Hz from values x [C, m] at times t."""
    even = len(t) < 2 or np.diff(t).max() <= 1.5 / measured
    if even and abs(measured / rate - 1) <= TOLERANCE:
        return x.astype(np.float32)
    grid = t[0] + np.arange(int((t[-1] - t[0]) * rate + 1e-6) + 1) / rate
    if measured > rate * (1 + TOLERANCE):  # means of the rows nearest to each time, against aliasing
        starts = np.flatnonzero(np.diff(np.floor((t - t[0]) * rate + 0.5 + 1e-6), prepend=-1))
        counts = np.diff(starts, append=len(t))
        t, x = np.add.reduceat(t, starts) / counts, np.add.reduceat(x, starts, axis=1) / counts
    return np.stack([np.interp(grid, t, row).astype(np.float32) for row in x])


def _quality(x: Numbers, names: Sequence[str]) -> Iterator[str]:
    """Remarks on missing values of channels x [C, n], and on channels that are constant or clipped."""
    if np.isnan(x).any():
        yield "values are missing"
    for index, row in enumerate(x):
        name, row = names[index] if names else f"{index + 1}", row[np.isfinite(row)]
        levels, counts = np.unique(row, return_counts=True)
        if len(levels) < 2:
            yield f"channel {name} {'is constant' if len(levels) else 'has no values'}"
        elif len(levels) > 20:  # a value that rests at 0, or has few levels, is not clipped
            near = 0.05 * (levels[-1] - levels[0])
            for end in (0, -1):
                others = counts[np.abs(levels - levels[end]) < near].sum() - counts[end]
                if levels[end] and counts[end] > max(2, CLIPPED * len(row), others):
                    yield f"channel {name} seems to be clipped at {levels[end]:g}"
