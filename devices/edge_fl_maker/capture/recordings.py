"""Recordings of a stream for the pool: WAV of a microphone, CSV with times of all else, of RECORDING_S at most and without a gap."""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import audio
from edge_fl_maker.capture.streams import MICROPHONE_RATE, Stream
from edge_fl_maker.capture.timeline import Piece, pieces

RECORDING_S = 60.0


class Captured(NamedTuple):
    """A file, where it comes from, and what it holds, if the source says it."""

    content: bytes
    source: str
    kind: Kind | None = None


class StreamRecordings:
    """Recordings of `source`, of the channels of `input`, or without a release of all that have numbers."""

    def __init__(self, source: str, input: InputSpec | None, notify: Callable[[str], None]) -> None:
        self._stream = Stream(source, input, notify)
        self._kind: Kind = "audio" if source.startswith("alsa:") else input.kind if input else "series"
        self._rate = input.rate if input else float(MICROPHONE_RATE)
        self._coming, self._parts, self._done = pieces(self._stream, input), list[Piece](), deque[bytes]()

    @property
    def interrupted(self) -> bool:
        return self._stream.interrupted

    def take(self) -> Iterator[Captured]:
        """Yield the recordings as they end, until the stream does."""
        yield from self._finished()
        for piece in self._coming:
            if self._parts and (piece.fresh or piece.times[-1] - self._parts[0].times[0] > RECORDING_S):
                self._end()
                yield from self._finished()
            self._parts.append(piece)
        self._end()
        yield from self._finished()

    def close(self) -> None:
        self._stream.close()

    def _finished(self) -> Iterator[Captured]:
        while self._done:
            yield Captured(self._done[0], self._stream.name, self._kind)
            self._done.popleft()

    def _end(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            return
        times, values = (np.concatenate(each, axis=-1) for each in list(zip(*parts, strict=True))[1:3])
        if self._kind == "audio":
            self._done.append(audio.wav(values[0], self._rate))
            return
        lines = io.StringIO()
        table = csv.writer(lines)
        table.writerow(["time", *parts[0].names])
        table.writerows(
            [f"{at:.6f}", *(f"{value:.7g}" for value in row)] for at, row in zip(times, values.T, strict=True)
        )
        self._done.append(lines.getvalue().encode())
