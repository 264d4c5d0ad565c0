"""Predict the newest frames of a camera, one after the other: `edge-fl device watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from edge_fl.inputs import InputSpec
from edge_fl.modalities import pictures
from edge_fl_devices.serving.predict import Prediction, Predictor
from edge_fl_maker.capture.camera import Camera, Frame
from edge_fl_maker.current_model import CurrentModel


@dataclass(frozen=True, slots=True)
class WatchedPrediction(Prediction):
    """A prediction, whose `name` is the camera's, with the time and the number of its frame.

    behind: the number of newer frames at the start of the prediction. head, accuracy: what the head is, and how accurate, in words.
    """

    time: str
    frame: int
    behind: int
    head: str = ""
    accuracy: str = ""


def watch(
    model: CurrentModel, camera: Camera, *, interval_s: float = 0.0, count: int = 0
) -> Iterator[WatchedPrediction]:
    """Predict the newest frame at most every `interval_s`, `count` times (0: until the video ends)."""
    made, due_s = 0, time.monotonic()
    while not count or made < count:
        time.sleep(max(0.0, due_s - time.monotonic()))
        due_s = max(due_s + interval_s, time.monotonic())
        if (frame := camera.newest()) is None:
            return
        behind, seen = camera.grabbed - frame.number, datetime.now(UTC)
        predictor = model.current()
        (found,) = predictor.predictions(_image(frame, predictor.manifest.input), [camera.name])
        made += 1
        yield _watched(found, seen, frame.number, behind, predictor)


def _watched(
    found: Prediction, seen: datetime, number: int, behind: int, predictor: Predictor
) -> WatchedPrediction:
    fields = {name: getattr(found, name) for name in Prediction.__slots__}
    time = seen.isoformat(timespec="milliseconds")
    head, accuracy = predictor.head_words, predictor.accuracy.words
    return WatchedPrediction(**fields, time=time, frame=number, behind=behind, head=head, accuracy=accuracy)


def _image(frame: Frame, input: InputSpec) -> NDArray[np.uint8]:
    """The frame as the extractor's input uint8 [1, C, H, W]."""
    if input.channels == 1:
        planes = pictures.grey(frame.pixels)[None]
    else:
        planes = frame.pixels.transpose(2, 0, 1)
    return pictures.fit(planes[None], input)
