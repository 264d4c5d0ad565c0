"""Series: recordings of sensors, cut into windows of several channels. A file is one recording, and its windows are one group.

A column of times is found by its name. Rows are brought to the rate of the input: linearly interpolated, and averaged before if there are
more of them. No window spans a place where the clock jumps back, or where values are missing for longer than LONG steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from edge_fl.errors import DataError, brief, shortened
from edge_fl.files.npz import Array
from edge_fl.files.paths import text
from edge_fl.inputs import InputSpec
from edge_fl.modalities import SIDE, Reading, Thumbnails, UnusableFileError, columns, require_kind
from edge_fl.modalities.columns import EMPTY, Columns, Numbers, Source
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


def arrays(x: Array, where: str) -> Windows:
    """Convert windows [N, C, T], or [N, T] of one channel, to float32. Raises DataError, which begins with `where`."""
    if x.ndim not in (2, 3):
        raise DataError(f"{where}: windows {list(x.shape)}, expected [N, C, T], or [N, T] of one channel")
    return columns.finite(x[:, None] if x.ndim == 2 else x, where)


def fit(x: Array, input: InputSpec, where: object = "windows") -> Windows:
    """Return windows in the shape of `input`. Raises DataError, which begins with `where`, for any other shape."""
    require_kind(input, "series", where)
    found = arrays(x, str(where))
    if found.shape[1:] != input.shape:
        turned = found.shape[:0:-1] == input.shape
        advice = (
            "these are [T, C]: pass x.transpose(0, 2, 1)" if turned else "`series.windows` cuts recordings"
        )
        raise DataError(
            f"{where}: windows of {list(found.shape[1:])}, the extractor takes {list(input.shape)} [C, T]; {advice}"
        )
    return found


def input_of(x: Windows, rows: NDArray[np.int64], given: InputSpec | None = None) -> InputSpec:
    """Return the input of windows [N, C, T], with mean and std of those at `rows`, and all else as `given`, or for 1 Hz."""
    mean, std = columns.moments(x, rows)
    given = given or InputSpec(x.shape[1:], axes="CT", dtype="float32", rate=1.0, hop=x.shape[2])
    return structs.replace(given, shape=x.shape[1:], mean=mean, std=std)


def windows(x: Array, input: InputSpec) -> Array:
    """Cut values [C, n] at the input's rate into windows [k, C, T], a view; the rest at the end is in none."""
    if x.shape[1] < input.window:
        return np.empty((0, len(x), input.window), x.dtype)
    found = np.lib.stride_tricks.sliding_window_view(x, input.window, axis=1)
    return found[:, :: input.hop].transpose(1, 0, 2)


def check(path: Path, limits: FileLimits = LIMITS) -> None:
    """Read the first lines of a recording. Raises UnusableFileError as `read`, apart from damage behind them."""
    columns.read(path, limits, head=True)


def read(
    path: Source, input: InputSpec | None, limits: FileLimits = LIMITS, bits: int = FULL_BITS
) -> Reading:
    """Return the windows [n, C, T] of a recording; without an input all its rows, as they are, as one window. Raises UnusableFileError.

    bits: not used.
    """
    if input is None:
        sheet, _, numeric = _opened(path, limits)
        return Reading(np.stack([sheet.numbers(index) for index in numeric]).astype(np.float32)[None])
    t, x, measured, remarks = recorded(path, input, limits)
    if abs(measured / input.rate - 1) > TOLERANCE:
        remarks.append(f"{measured:.4g} Hz, resampled to {input.rate:g} Hz")
    parts = _parts(t, measured, input.rate, remarks)
    values = sum(len(x) * (t[part][-1] - t[part][0]) * input.rate for part in parts)
    columns.require_memory(path, 16 * values * max(1, input.window / input.hop), limits)
    pieces = [piece for part in parts for piece in at_rate(t[part], x[:, part], measured, input.rate)]
    found = [windows(piece.astype(np.float32), input) for piece in pieces]
    if not sum(map(len, found)):
        longest = max((piece.shape[1] for piece in pieces), default=0)
        detail = (
            f"{longest / input.rate:.4g} s without a gap, a window takes {input.window / input.rate:.4g} s"
        )
        raise UnusableFileError(path, "shorter than a window", "; ".join([detail, *remarks]))
    return Reading(np.concatenate(found), tuple(remarks))


def recorded(
    path: Source, input: InputSpec, limits: FileLimits = LIMITS
) -> tuple[Numbers, Numbers, float, list[str]]:
    """Return times [n] in seconds, values [C, n] with NaN where one is missing, their rate in Hz, and remarks. Raises UnusableFileError."""
    require_kind(input, "series", text(path) if isinstance(path, Path) else "recording")
    sheet = columns.read(path, limits, input.channels)
    t, clocks = _clock(sheet, input.names, input.rate)
    x = sheet.chosen(input.names, input.channels, clocks)
    remarks, measured = list(_quality(x, input.names)), sheet.rate or input.rate
    if t is None:
        return np.arange(x.shape[1]) / measured, x, measured, remarks
    return (*_ordered(t, x, input.rate, remarks), remarks)


class Description(NamedTuple):
    """Names and units of the channels that a recording seems to have, its rate in Hz (0: it has no times), its length in rows."""

    names: tuple[str, ...]
    units: tuple[str, ...]
    rate: float
    length: int


def describe(path: Path, limits: FileLimits = LIMITS) -> Description:
    """Describe a recording: all columns of numbers but times are channels. Raises UnusableFileError."""
    sheet, t, numeric = _opened(path, limits)
    rate = sheet.rate if t is None else _ordered(t, np.empty((0, len(t))), 0.0, [])[2]
    names, units = (tuple(of[index] for index in numeric) for of in (sheet.names, sheet.units))
    return Description(names, units, rate, len(sheet.lines))


def propose(files: Sequence[Path], window_s: float | None = None, rate: float | None = None) -> InputSpec:
    """Return an input for recordings: the columns of most of them, their median rate, windows up to WINDOW_S that overlap by half.

    Raises UnusableFileError; DataError, which names the first file that lacks a column, or lacks times if there is no `rate`.
    """
    found = {path: describe(path) for path in files}
    names = columns.common({path: about.names for path, about in found.items()})
    if not rate:
        for path, about in found.items():
            if not about.rate:
                raise DataError(
                    f"{text(path)}: no column of times, such as 'time'; state the rate of its rows in Hz"
                )
        measured = float(np.median([about.rate for about in found.values()]))
        near = (float(f"{measured:.{digits}g}") for digits in (1, 2, 4))
        rate = next(value for value in near if abs(value / measured - 1) <= TOLERANCE)
    if window_s is None:
        seconds = [about.length / (about.rate or rate) for about in found.values()]
        most = max(LEAST_WINDOW, rate * min(WINDOW_S, float(np.quantile(seconds, 0.1))))
        digits = 10 ** math.floor(math.log10(most))
        window = int(most // digits * digits) if most // digits * digits >= 0.64 * most else int(most)
    else:
        window = max(1, round(window_s * rate))
    first = next(iter(found.values()))
    units = dict(zip(first.names, first.units, strict=True))
    return InputSpec(
        (len(names) or len(first.names), window),
        mean=(0.0,),
        std=(1.0,),
        axes="CT",
        dtype="float32",
        rate=rate,
        hop=max(1, window // 2),
        names=names,
        units=tuple(units.get(name, "") for name in names),
    )


def synthetic(input: InputSpec, count: int, seed: int) -> Windows:
    """Windows [N, C, T] of noise with amplitude 1/sqrt(frequency) and a sine in every channel, with the input's mean and std."""
    rng = generator(seed, "release.synthetic")
    shape, length = (count, *input.shape), input.window
    frequency = np.maximum(np.fft.rfftfreq(length), 1 / length)
    noise = np.fft.irfft(np.fft.rfft(rng.standard_normal(shape)) / np.sqrt(frequency), n=length)
    noise /= np.maximum(noise.std(2, keepdims=True), 1e-9)
    cycles, phase, share = (
        rng.uniform(0, most, (*shape[:2], 1)) for most in (max(2, length / 8), 2 * np.pi, 1)
    )
    sines = np.sqrt(2) * np.sin(2 * np.pi * cycles * np.arange(length) / length + phase)
    mean, std = (np.broadcast_to(values, input.channels)[:, None] for values in (input.mean, input.std))
    found: Windows = (mean + std * (np.sqrt(share) * sines + np.sqrt(1 - share) * noise)).astype(np.float32)
    return found


def thumbnails(x: Windows) -> Thumbnails:
    """Windows [n, C, T], each channel standardised by its own mean and std (0 if it is flat), as means of cells, [n, 256] levels."""
    found = np.empty((len(x), SIDE * SIDE), np.uint8)
    edges = np.linspace(0, math.prod(x.shape[1:]), SIDE * SIDE + 1).astype(int)
    for row, window in enumerate(x):
        centred = window - window.mean(1, keepdims=True)
        spread = centred.std(1, keepdims=True)
        flat = spread <= 1e-6 * np.abs(window).max(1, keepdims=True)
        values = (centred / np.where(flat, np.inf, spread)).reshape(-1)
        means = np.add.reduceat(values, edges[:-1]) / np.maximum(np.diff(edges), 1)
        found[row] = np.rint(128 + 32 * means).clip(1, 254).astype(np.uint8)
    return found


def side(x: Windows) -> int:
    """Return 0: windows have no size in pixels."""
    return 0


def _opened(path: Source, limits: FileLimits) -> tuple[Columns, Numbers | None, list[int]]:
    """Return a recording, its times, and the columns that may be channels."""
    sheet = columns.read(path, limits)
    t, clocks = _clock(sheet, (), 0.0)
    if not (numeric := sheet.numeric(clocks)):
        raise UnusableFileError(path, "no column of numbers", shortened(sheet.names))
    return sheet, t, numeric


def _clock(sheet: Columns, names: Sequence[str], rate: float) -> tuple[Numbers | None, set[int]]:
    """Return the times of the rows in seconds, None if there are none, and the columns of times, which are none of `names`.

    Of several the one with the most different times is used. A column without a name is one if it holds ISO 8601.
    """
    wanted, times, clocks = {columns.key(name) for name in names}, list[Numbers](), set[int]()
    for index, name in enumerate(sheet.names):
        words = [word if len(word) == 1 else word.lower() for word in _BETWEEN_WORDS.split(name)]
        named = (
            name.casefold() not in wanted and not CLOCKS.isdisjoint(words) and set(words) <= CLOCKS | _ASIDE
        )
        values = sheet.values[index]
        if isinstance(values, list) and (named or not name):
            try:
                times.append(np.array(list(map(_iso, values))))
            except ValueError:
                if not named:
                    continue
            clocks.add(index)
        elif named and not isinstance(values, list):
            stated = next((SECONDS[word] for word in (sheet.units[index], *words) if word in SECONDS), None)
            times.append(values * (stated or _unit(values, rate)))
            clocks.add(index)
    if clocks and not times:
        index = min(clocks)
        detail = (
            f"column {sheet.names[index]}: {brief(sheet.values[index][0])!r}, expected numbers or ISO 8601"
        )
        raise UnusableFileError(sheet.source, "times of another form", detail)
    return max(times, key=lambda t: len(np.unique(t)), default=None), clocks


def _iso(cell: str) -> float:
    """Convert a date and time in ISO 8601, or a time of day, to seconds; without a time zone it counts as UTC."""
    cell = cell.strip()
    if cell.lower() in EMPTY:
        return math.nan
    found = datetime.fromisoformat(f"1970-01-01T{cell}" if cell[2:3] == ":" else cell)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _unit(t: Numbers, rate: float) -> float:
    """Return the unit of times in seconds: by their size since 1970, else by their step and the rate that is expected, 0: any."""
    units = sorted(set(SECONDS.values()), reverse=True)
    for unit in units:
        if _EPOCH[0] < np.nanmedian(t) * unit < _EPOCH[1]:
            return unit
    step = 1 / _rate(t)
    if rate:
        return min(units, key=lambda unit: abs(math.log(step * unit * rate)))
    return next((unit for unit, most in zip(units, (5, 2e3, 1e6), strict=False) if step < most), units[-1])


def _rate(t: Numbers) -> float:
    """Return the rows per unit of time: 1 divided by the mean of the steps that are no gaps; 1 without any step."""
    steps = np.abs(np.diff(t[np.isfinite(t)]))
    steps = steps[steps > 0]
    return 1 / float(np.mean(steps[steps <= GAP * np.median(steps)])) if len(steps) else 1.0


def _ordered(t: Numbers, x: Numbers, rate: float, remarks: list[str]) -> tuple[Numbers, Numbers, float]:
    """Return times that increase, but for jumps back, with their rows, and the rate that they show in Hz."""
    known = np.isfinite(t)
    if not known.all():
        remarks.append(f"{np.sum(~known)} rows without a time, left out")
        t, x = t[known], x[:, known]
    steps = np.diff(t)
    if len(t) < 2 or not steps.any():
        return np.arange(len(t)) / (rate or 1.0), x, rate
    if np.median(steps) < 0:
        remarks.append("latest row first: turned")
        t, x, steps = t[::-1], x[:, ::-1], -steps[::-1]
    if np.median(steps) == 0 and (steps >= 0).all():
        remarks.append(f"several rows have the same time, as it is written: taken as {_rate(t):.4g} s apart")
        t = np.linspace(t[0], t[-1], len(t))
    elif not steps.all():
        remarks.append(f"{np.sum(steps == 0)} rows repeat the time of the one before, left out")
        kept = np.concatenate([[True], steps != 0])
        t, x = t[kept], x[:, kept]
    return t, x, _rate(t)


def _parts(t: Numbers, measured: float, rate: float, remarks: list[str]) -> list[slice]:
    """Divide rows where the clock jumps back, or where rows are missing for longer than is interpolated."""
    steps, step = np.diff(t), 1 / measured
    back, long = steps < 0, steps > LONG * max(step, 1 / rate)
    if back.any():
        remarks.append(f"the clock jumps back {back.sum()} times: cut there")
    if gaps := int(np.sum(steps > GAP * step)):
        remarks.append(f"{gaps} gaps, of which {long.sum()} are too long to interpolate")
    edges = [0, *(np.flatnonzero(back | long) + 1), len(t)]
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]


def at_rate(t: Numbers, x: Numbers, measured: float, rate: float) -> Iterator[Numbers]:
    """Yield the values [C, n] of rows x [C, m] at times t, at a rate in Hz, in pieces without gaps of a channel."""
    even = len(t) < 2 or np.diff(t).max() <= 1.5 / measured
    if even and abs(measured / rate - 1) <= TOLERANCE and np.isfinite(x).all():
        yield x
        return
    grid = t[0] + np.arange(int((t[-1] - t[0]) * rate + 1e-6) + 1) / rate
    late = grid + 1e-6 / rate  # rounding
    found, is_valid = np.empty((len(x), len(grid))), np.ones(len(grid), bool)
    for row, values in zip(found, x, strict=True):
        known = np.isfinite(values)
        at, values = t[known], values[known]
        if len(at) < 2:
            return
        steps = np.diff(at)
        place = np.searchsorted(at, late, "right") - 1
        ends = at + np.append(np.where(steps > LONG * max(np.median(steps), 1 / rate), 0, steps), 0)
        is_valid &= (place >= 0) & (grid <= ends[place] + 2e-6 / rate)
        if measured > rate * (1 + TOLERANCE):  # the mean of what is nearest to each time, against aliasing
            cell = ((at - t[0]) * rate + 0.5 + 1e-6).astype(np.int64)
            counts = np.bincount(cell)
            at, values = (np.bincount(cell, of)[counts > 0] / counts[counts > 0] for of in (at, values))
        row[:] = np.interp(grid, at, values)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_valid, [False]]).astype(np.int8)))
    for start, stop in edges.reshape(-1, 2):
        yield found[:, start:stop]


def _quality(x: Numbers, names: Sequence[str]) -> Iterator[str]:
    """Remarks on channels x [C, n] that are constant or clipped, and on missing values."""
    if missing := int(np.sum(np.isnan(x))):
        yield f"{missing} values are missing"
    for index, row in enumerate(x):
        name, row = names[index] if names else f"{index + 1}", row[np.isfinite(row)]
        if not len(row) or row.min() == row.max():
            yield f"channel {name} is constant" if len(row) else f"channel {name} has no values"
            continue
        band = 0.05 * (row.max() - row.min())
        for extreme in (row.min(), row.max()):
            equal, near = np.sum(row == extreme), np.sum(np.abs(row - extreme) < band)
            # a value that rests at 0, or has few levels, is not clipped
            if (
                extreme
                and equal > CLIPPED * len(row)
                and 2 * equal > near
                and len(np.unique(row[:10_000])) > 20
            ):
                yield f"channel {name} seems to be clipped at {extreme:g}"
