"""Recordings of streams for the pool."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import chain

import numpy as np

from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import audio
from edge_fl_maker.capture.pools import Captured
from edge_fl_maker.capture.streams import MICROPHONE_RATE, Stream
from edge_fl_maker.capture.timeline import Piece, pieces

RECORDING_S = 60.0


class StreamFiles(Stream):
    """Recordings without a gap of RECORDING_S at most: WAV of a microphone, CSV with times of all else.

    They have the channels of `input`, or before the first release all that have numbers.
    """

    def __init__(self, source: str, input: InputSpec | None, notify: Callable[[str], None]) -> None:
        super().__init__(source, input, notify)
        self._kind: Kind = "audio" if source.startswith("alsa:") else input.kind if input else "series"
        self._pieces, self._parts, self._ended = pieces(self, input), list[Piece](), list[bytes]()

    def take(self) -> Iterator[Captured]:
        """Yield the recordings as they end, until the stream does."""
        for piece in chain([None], self._pieces, [None]):
            parts = self._parts
            if parts and (piece is None or piece.fresh or piece.times[-1] - parts[0].times[0] > RECORDING_S):
                self._ended.append(self._encoded())
                parts.clear()
            if piece:
                parts.append(piece)
            while self._ended:
                yield Captured(self._ended[0], self.name, self._kind)
                self._ended.pop(0)

    def _encoded(self) -> bytes:
        times = np.concatenate([part.times for part in self._parts])
        values = np.concatenate([part.values for part in self._parts], axis=1)
        if self._kind == "audio":
            return audio.wav(values[0].astype(np.float32), self.input.rate if self.input else MICROPHONE_RATE)
        file = StringIO()
        table = csv.writer(file)
        table.writerow(["time", *self._parts[0].names])
        for time, row in zip(times, values.T, strict=True):
            table.writerow([f"{time:.6f}", *(f"{value:.7g}" for value in row)])
        return file.getvalue().encode()
