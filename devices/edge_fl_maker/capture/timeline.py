"""One recording out of the values of a stream, and the samples of an extractor that it holds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import shortened
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import series
from edge_fl.modalities.columns import key
from edge_fl_maker.capture import streams
from edge_fl_maker.capture.streams import Block, Floats, Stream

STEPS = 32
JITTER_S = 1.0
"""Longest pause of a stream without times of its own in which no value is taken for lost."""
SMOOTHED, NEAR = 1 / 16, 0.25
LOST, HALF = 1.5, 0.5
NONE = np.empty(0, np.float32)


class Piece(NamedTuple):
    """The next values [C, n] of all channels, at increasing times [n] in seconds; `fresh`: values are missing before them."""

    names: tuple[str, ...]
    times: NDArray[np.float64]
    values: Floats
    fresh: bool


class Timeline:
    """Makes pieces of blocks: with the channels of `input`, or without it all that have numbers.

    Sensors may send only what has changed: a message with some of the channels is completed with the last values of the others. Times are
    those of the messages; without them those of their arrival, smoothed if the messages come at the input's rate.
    """

    def __init__(self, stream: Stream, input: InputSpec | None) -> None:
        self._stream, self._rate = stream, input.rate if input else 0.0
        self._wanted = {key(name): name for name in input.names} if input else {}
        self._pending: dict[str, Floats] = {}
        self._held: dict[str, tuple[float, float]] = {}
        self._names: tuple[str, ...] = ()
        self._clock: tuple[float | None, float] = None, 0.0
        self._now = self._arrived = math.nan
        self._steps, self._step = deque[float](maxlen=STEPS), 1 / self._rate if self._rate else 0.0
        self._is_fresh = self._by_arrival = False

    def add(self, block: Block) -> Iterator[Piece]:
        """Yield the values that are complete now."""
        found = {
            self._wanted.get(key(name), "") if self._wanted else name: each
            for name, each in block.values.items()
        }
        if not self._wanted:
            found = {
                name: each for name, each in found.items() if name in self._held or np.isfinite(each).any()
            }
        elif found.pop("", None) is not None and not found:
            received, expected = shortened([*block.values]), shortened([*self._wanted.values()])
            self._stream.say("names", f"no channel of the extractor in {received}; expected {expected}")
        if self._pending.keys() & found.keys():
            yield from self._complete()
        if found:
            self._pending |= found
            self._clock = block.time, block.arrived
            if len(self._pending) >= len(self._wanted or self._held):
                yield from self._complete()

    def _complete(self) -> Iterator[Piece]:
        pending, self._pending = self._pending, {}
        names = (*self._wanted.values(),) or (*(self._held | pending),)
        count, rows, absent = max(map(len, pending.values())), [], []
        for name in names:
            last, since_s = self._held.get(name, (math.nan, -math.inf))
            given = (
                pending.get(name, NONE) if len(pending.get(name, NONE)) == count else np.full(count, math.nan)
            )
            row = np.append(np.float32(last), given)
            is_number = np.isfinite(row)
            if name in pending and not is_number[1:].all():
                self._stream.say(f"number {name}", f"{name}: no number; its last one is used")
            since_s = self._clock[1] if is_number[1:].any() else since_s
            row = row[np.maximum.accumulate(np.where(is_number, np.arange(count + 1), 0))]
            rows.append(row[1:])
            self._held[name] = float(row[-1]), since_s
            if not np.isfinite(row[1]) or self._clock[1] - since_s > streams.SILENT_S:
                absent.append(name)
        if absent:
            self._stream.say(
                "absent",
                f"no value of {shortened(absent)}, only of {shortened([*pending])}; nothing is predicted",
            )
            self._now = math.nan
            return
        times = self._times(count)
        fresh, self._names = self._is_fresh or names != self._names, names
        yield Piece(names, times, np.stack(rows)[:, -len(times) :], fresh)

    def _times(self, count: int) -> NDArray[np.float64]:
        """The times of as many new values, or only that of the last one if the time between them is not known yet."""
        sent_s, arrived_s = self._clock
        self._by_arrival |= sent_s is None
        before_s, now_s = self._now, arrived_s if self._by_arrival or sent_s is None else sent_s
        rising_s, passed_s, was_fresh = now_s - before_s, arrived_s - self._arrived, self._is_fresh
        nominal_s = 1 / self._rate if self._rate else 0.0
        step_s = sum(self._steps) / len(self._steps) if self._steps else nominal_s or math.inf
        most_s = (series.LONG if count == 1 else LOST) * max(step_s, nominal_s)
        if self._by_arrival or not self._steps:
            most_s = max(most_s, JITTER_S / (count if self._steps else 1))
        self._is_fresh = not 0 < rising_s / count <= most_s
        if not self._is_fresh:
            self._steps.append(rising_s / count)
            if self._by_arrival and abs(step_s - nominal_s) < NEAR * nominal_s:
                expected_s = before_s + count * step_s
                now_s = max(before_s + step_s / 10, expected_s + SMOOTHED * (now_s - expected_s))
            times = np.linspace(before_s, now_s, count + 1, dtype=np.float64)[1:]
        else:
            if not math.isnan(before_s):
                self._say_gap(rising_s, passed_s, was_fresh)
            self._steps.clear()
            times = now_s - step_s * np.arange(count)[::-1] if math.isfinite(step_s) else np.array([now_s])
        if len(self._steps) == STEPS and abs(step_s - self._step) > NEAR * self._step:
            if self._step:
                words = f"{1 / step_s:.3g} values per second, {1 / self._step:.3g} before or expected"
                self._stream.say("rate", words + "; they are resampled")
            self._step = step_s
        self._now, self._arrived = now_s, arrived_s
        return times

    def _say_gap(self, rising_s: float, passed_s: float, again: bool) -> None:
        """Say why the recording begins anew; a clock that jumps `again` is not used any more."""
        words = f"no values for {passed_s:.3g} s"
        if rising_s <= 0 or abs(rising_s - passed_s) > JITTER_S:
            words = f"its clock went {rising_s:+.3g} s in {passed_s:.3g} s"
            if again and not self._by_arrival:
                self._by_arrival, words = True, f"{words}; times of arrival count from now on"
        self._stream.say("gap", f"{words}; a new recording begins")


def pieces(stream: Stream, input: InputSpec | None) -> Iterator[Piece]:
    """Yield the values of a stream as they come."""
    timeline = Timeline(stream, input)
    for block in stream.blocks():
        yield from timeline.add(block)


def samples(stream: Stream, input: InputSpec) -> Iterator[Array]:
    """Yield the samples [1, *shape] in the values of a stream as they come: its windows, or the rows for a table."""
    times, values, length_s = np.empty(0), np.empty((input.channels, 0), np.float32), 0.0
    for piece in pieces(stream, input):
        if len(piece.values) != input.channels:
            words = f"{len(piece.values)} channels ({shortened(piece.names)}), the extractor takes {input.channels}"
            stream.say("channels", words + "; nothing is predicted")
            continue
        if input.kind == "table":
            yield from piece.values.T[:, None]
            continue
        times = piece.times if piece.fresh else np.append(times, piece.times)
        values = piece.values if piece.fresh else np.append(values, piece.values, axis=1)
        length_s = (input.window - 1) / input.rate
        while len(times) > 1 and times[-1] - times[0] > length_s - HALF / input.rate:
            measured = (len(times) - 1) / (times[-1] - times[0])
            found = next(
                series._at_rate(times, values.astype(np.float64), measured, input.rate), values[:, :0]
            )[:, : input.window]
            if found.shape[1] == input.window:
                yield (found if input.kind == "series" else found[0])[None].astype(np.float32)
            elif times[-1] - times[0] < length_s + 2 / input.rate:
                break  # the last value is missing
            kept = times > times[0] + (input.hop - HALF) / input.rate
            times, values = times[kept], values[:, kept]
