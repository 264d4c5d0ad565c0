"""Predict the newest frames of a camera, or the windows of a stream, one after the other: `edge-fl device watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from edge_fl.console.output import print_status
from edge_fl.errors import InputError
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, pictures
from edge_fl_devices.serving.predict import Prediction, Predictor
from edge_fl_maker.capture.camera import Camera, Frame
from edge_fl_maker.capture.streams import Stream
from edge_fl_maker.capture.timeline import samples
from edge_fl_maker.consensus import Consensus
from edge_fl_maker.current_model import CurrentModel


@dataclass(frozen=True, slots=True)
class WatchedPrediction(Prediction):
    """A prediction, whose `name` is the camera's or stream's, with the time and the number of its frame or window.

    behind: the number of newer frames (of a stream, blocks of values) at the start of the prediction. head, accuracy: what the head is, and
    how accurate, in words. state: what the last predictions agree on, None before they do; without a consensus the class, or why there is
    none. flips: how often the state has changed.
    """

    time: str
    frame: int
    behind: int
    head: str = ""
    accuracy: str = ""
    state: str | None = None
    flips: int = 0


class Sample(NamedTuple):
    """A sample x [1, ...] with its number and that of newer ones, and the predictor that it was prepared for."""

    predictor: Predictor
    x: Array
    number: int
    behind: int


def watch(
    model: CurrentModel,
    source: Camera | Stream,
    *,
    interval_s: float = 0.0,
    count: int = 0,
    consensus: Consensus | None = None,
) -> Iterator[WatchedPrediction]:
    """Predict the newest frame, or the next window, at most every `interval_s`, `count` times (0: until the video ends).

    Raises InputError for a stream if the release takes pictures.
    """
    made, due_s = 0, time.monotonic()
    taken = _frames(model, source) if isinstance(source, Camera) else _windows(model, source)
    while not count or made < count:
        if isinstance(source, Camera):
            time.sleep(max(0.0, due_s - time.monotonic()))
        if (sample := next(taken, None)) is None:
            return
        if time.monotonic() < due_s:
            continue
        due_s = max(due_s + interval_s, time.monotonic())
        seen = datetime.now(UTC)
        (found,) = sample.predictor.predictions(sample.x, [source.name])
        made += 1
        if consensus and consensus.add(found.label, time.monotonic()):
            print_status(f"{source.name}: {consensus.state} (change {consensus.flips})")
        yield _watched(found, seen, sample, consensus)


def _frames(model: CurrentModel, camera: Camera) -> Iterator[Sample]:
    while frame := camera.newest():
        predictor = model.current()
        image = _image(frame, predictor.manifest.input)
        yield Sample(predictor, image, frame.number, camera.grabbed - frame.number)


def _windows(model: CurrentModel, stream: Stream) -> Iterator[Sample]:
    """Yield the windows of a stream; a release of another kind of samples does not predict them, the one before does."""
    predictor, number = model.current(), 0
    about = ABOUT[predictor.manifest.input.kind]
    if predictor.manifest.input.kind == "picture":
        raise InputError(f"stream {stream.name}: the release takes {about.samples}; expected --camera")
    taken = samples(stream, predictor.manifest.input)
    while (x := next(taken, None)) is not None:
        number += 1
        yield Sample(predictor, x, number, stream.waiting)
        if (newer := model.current()) is not predictor:
            before, after = predictor.manifest, newer.manifest
            if after.input.kind != before.input.kind:
                words = f"release {after.release} takes {ABOUT[after.input.kind].samples}, expected {about.samples}"
                stream.say("release", f"{words}; release {before.release} predicts on")
                continue
            if after.input != before.input:
                taken = samples(stream, after.input)
            predictor = newer


def _watched(
    found: Prediction, seen: datetime, sample: Sample, consensus: Consensus | None
) -> WatchedPrediction:
    fields = {name: getattr(found, name) for name in Prediction.__slots__}
    return WatchedPrediction(
        **fields,
        time=seen.isoformat(timespec="milliseconds"),
        frame=sample.number,
        behind=sample.behind,
        head=sample.predictor.head_words,
        accuracy=sample.predictor.accuracy.words,
        state=consensus.state if consensus else found.text,
        flips=consensus.flips if consensus else 0,
    )


def _image(frame: Frame, input: InputSpec) -> Array:
    """The frame as the extractor's input [1, C, H, W]."""
    if input.channels == 1:
        planes = pictures.grey(frame.pixels)[None]
    else:
        planes = frame.pixels.transpose(2, 0, 1)
    return pictures.fit(planes[None], input)
