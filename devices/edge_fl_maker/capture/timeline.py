"""One recording out of the values of a stream, and the samples of an extractor that it holds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from edge_fl.errors import shortened
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import series
from edge_fl.modalities.columns import key
from edge_fl_maker.capture import streams
from edge_fl_maker.capture.streams import Block, Numbers, Stream

STEPS, NEAR, LOST, SMOOTHED = 32, 0.25, 1.5, 1 / 16
JITTER_S = 1.0
"""Longest pause of a stream without times of its own in which no value is taken for lost."""


class Piece(NamedTuple):
    """The next values [C, n] of all channels, at increasing times [n] in seconds; `fresh`: values are missing before them."""

    names: tuple[str, ...]
    times: Numbers
    values: Numbers
    fresh: bool


class Timeline:
    """Makes pieces of blocks: with the channels of `input`, or without it all that have numbers.

    Sensors may send only what has changed: a message with some of the channels is completed with the last values of the others. Times are
    those of the messages, or those of their arrival, smoothed if they come at the input's rate.
    """

    def __init__(self, say: Callable[[str, str], None], input: InputSpec | None) -> None:
        self._say, self._wanted = say, {key(name): name for name in input.names} if input else {}
        self._pending: dict[str, Numbers] = {}
        self._held, self._seen = dict[str, float](), dict[str, float]()
        self._sent: float | None = None
        self._arrived, self._last = 0.0, (math.nan, math.nan)
        self._nominal_s = self._step_s = 1 / input.rate if input and input.rate else 0.0
        self._steps, self._by_arrival, self._is_fresh = deque[float](maxlen=STEPS), False, False

    def add(self, block: Block) -> Iterator[Piece]:
        """Yield the values that are complete now."""
        values, sent_s, arrived_s = block
        if wanted := self._wanted:
            values = {wanted[key(name)]: each for name, each in values.items() if key(name) in wanted}
        found = {
            k: each for k, each in values.items() if wanted or k in self._held or np.isfinite(each).any()
        }
        if not found:
            received, expected = shortened([*block[0]]), shortened([*wanted.values()]) or "numbers"
            return self._say("names", f"no channel in {received}; expected {expected}")
        if self._pending.keys() & found.keys():
            yield from self._complete()
        self._pending |= found
        self._seen |= dict.fromkeys(found, arrived_s)
        self._sent, self._arrived = sent_s, arrived_s
        if len(self._pending) >= len(wanted or self._held):
            yield from self._complete()

    def _complete(self) -> Iterator[Piece]:
        pending, self._pending = self._pending, {}
        names = (*self._wanted.values(),) or (*(self._held | pending),)
        count, rows = max(map(len, pending.values())), []
        for name in names:
            row = np.full(count + 1, self._held.get(name, math.nan))
            if name in pending:
                row[1:] = pending[name] if len(pending[name]) == count else math.nan
                if not np.isfinite(row[1:]).all():
                    self._say(f"number {name}", f"{name}: a value that is no number; the last one is used")
            rows.append(row[np.maximum.accumulate(np.where(np.isfinite(row), np.arange(count + 1), 0))][1:])
        values = np.stack(rows)
        if [*self._held] != [*names]:  # other columns than before
            self._last = math.nan, math.nan
        self._held = dict(zip(names, values[:, -1].tolist(), strict=True))
        absent = [name for name, row in zip(names, values, strict=True) if not np.isfinite(row[0])]
        late = [name for name in names if self._arrived - self._seen.get(name, 0.0) > streams.SILENT_S]
        if absent or late:
            then = "nothing is predicted" if absent else "the last one is used"
            self._say("absent", f"no value of {shortened(absent or late)} comes; {then}")
        if not absent:
            times = self._times(count)
            yield Piece(names, times, values[:, -len(times) :], self._is_fresh)

    def _times(self, count: int) -> Numbers:
        """The times of as many new values, or only that of the last one if the time between them is not known yet."""
        if self._sent is None and not self._by_arrival:
            self._by_arrival, self._last = True, (math.nan, math.nan)
        (before_s, before_arrived_s), was_fresh = self._last, self._is_fresh
        now_s = self._arrived if self._by_arrival or self._sent is None else self._sent
        passed_s = self._arrived - before_arrived_s
        rising_s = passed_s if self._by_arrival else now_s - before_s
        step_s = sum(self._steps) / len(self._steps) if self._steps else self._step_s or math.inf
        most_s = (series.LONG if count == 1 else LOST) * max(step_s, self._nominal_s)
        if self._by_arrival or not self._steps:
            most_s = max(most_s, JITTER_S / (count if self._steps else 1))
        self._is_fresh = not 0 < rising_s / count <= most_s
        each_s = step_s
        if not self._is_fresh:
            self._steps.append(rising_s / count)
            if self._by_arrival and abs(step_s - self._nominal_s) < NEAR * self._nominal_s:
                now_s -= (1 - SMOOTHED) * (now_s - before_s - count * step_s)
            now_s = max(now_s, before_s + rising_s / 10)
            each_s = (now_s - before_s) / count
        elif not math.isnan(before_s):
            jumps = rising_s <= 0 or abs(rising_s - passed_s) > JITTER_S
            words = f"its clock went {rising_s:+.3g} s" if jumps else "no values"
            self._say("gap", f"{words} in {passed_s:.3g} s; a new recording begins")
            if jumps and was_fresh:
                self._by_arrival, now_s = True, self._arrived
            self._steps.clear()
        if len(self._steps) == STEPS and abs(step_s - self._step_s) > NEAR * self._step_s:
            if self._step_s:
                words = f"about {1 / step_s:.3g} values per second, not {1 / self._step_s:.3g}"
                self._say("rate", f"{words} as before or expected; resampled")
            self._step_s = step_s
        self._last = now_s, self._arrived
        back = np.arange(count, dtype=np.float64)[::-1]
        return now_s - each_s * back if each_s < math.inf else np.array([now_s])


def pieces(stream: Stream, input: InputSpec | None) -> Iterator[Piece]:
    """Yield the values of a stream as they come."""
    timeline = Timeline(stream.say, input)
    for block in stream.blocks():
        yield from timeline.add(block)


def samples(stream: Stream, input: InputSpec) -> Iterator[Array]:
    """Yield the samples [1, *shape] in the values of a stream as they come: its windows, or the rows for a table."""
    times, values = np.empty(0), np.empty((input.channels, 0))
    for piece in pieces(stream, input):
        if len(piece.values) != input.channels:
            words = f"channels {shortened(piece.names)}, the extractor takes {input.channels}; nothing is predicted"
            stream.say("channels", words)
        elif input.kind == "table":
            yield from piece.values.T[:, None].astype(np.float32)
        else:
            if piece.fresh:
                times, values = times[:0], values[:, :0]
            times, values = np.append(times, piece.times), np.append(values, piece.values, axis=1)
            while (span := len(times) and (times[-1] - times[0]) * input.rate) > input.window - 1.5:
                x = series.at_rate(times, values, (len(times) - 1) * input.rate / span, input.rate)
                if x.shape[1] < input.window:
                    break  # the last value is missing
                yield x[:, : input.window].reshape(1, *input.shape)
                kept = times > times[0] + (input.hop - 0.5) / input.rate
                times, values = times[kept], values[:, kept]
