"""Predict the newest frames of a camera, or the windows of a stream, one after the other: `edge-fl device watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from edge_fl.console import units
from edge_fl.console.output import print_status
from edge_fl.errors import InputError
from edge_fl.files.npz import Array
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, pictures
from edge_fl_devices.serving.predict import Prediction, Predictor
from edge_fl_maker.capture.camera import NOTHING, Camera, Frame
from edge_fl_maker.capture.streams import Stream
from edge_fl_maker.capture.timeline import samples
from edge_fl_maker.consensus import HOUR_S, LEAST_S, Consensus, Flips
from edge_fl_maker.current_model import CurrentModel


@dataclass(frozen=True, slots=True)
class WatchedPrediction(Prediction):
    """A prediction, whose `name` is the camera's or stream's, with the time and the number of its frame or window.

    behind: the number of newer frames (of a stream, blocks of values) at the start of the prediction. head, accuracy: what the head is, and
    how accurate, in words. state: what the last predictions agree on, None before they do; without a consensus the class, or why there is
    none. flips: how often the state has changed in `watched_s` seconds, raw_flips: how often the class of single predictions has; the same
    per hour, of the last one or since the beginning, None in the first ten minutes. release: the one that predicts.
    """

    time: str
    frame: int
    behind: int
    head: str = ""
    accuracy: str = ""
    state: str | None = None
    flips: int = 0
    raw_flips: int = 0
    flips_per_hour: float | None = None
    raw_flips_per_hour: float | None = None
    watched_s: float = 0.0
    release: int = 0


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
    flips, raw_flips = Flips(), Flips()
    taken = _frames(model, source) if isinstance(source, Camera) else _windows(model, source)
    for predictor, x, number, behind in taken:
        if time.monotonic() < due_s:
            continue
        due_s, seen = max(due_s + interval_s, time.monotonic()), datetime.now(UTC)
        (found,) = predictor.predictions(x, [source.name])
        now_s = time.monotonic()
        changed = consensus.add(found.label, now_s) if consensus else False
        raw_flips.add(found.label, now_s)
        flips.add(consensus.state if consensus else found.label, now_s)
        if consensus and changed:
            print_status(f"{source.name}: {consensus.state} (change {flips.count})")
        yield WatchedPrediction(
            **{name: getattr(found, name) for name in Prediction.__slots__},
            time=seen.isoformat(timespec="milliseconds"),
            frame=number,
            behind=behind,
            head=predictor.head_words,
            accuracy=predictor.accuracy.words,
            state=consensus.state if consensus else found.text,
            flips=flips.count,
            raw_flips=raw_flips.count,
            flips_per_hour=flips.per_hour,
            raw_flips_per_hour=raw_flips.per_hour,
            watched_s=round(flips.watched_s, 3),
            release=predictor.manifest.release,
        )
        made += 1
        if made == count:
            return
        if isinstance(source, Camera):
            time.sleep(max(0.0, due_s - time.monotonic()))


def summary(last: WatchedPrediction, *, agreed: bool) -> str:
    """How often the class has changed until the last prediction, and per hour; if the predictions had to agree, also the state."""
    counts = {"the class of single predictions": last.raw_flips} | (
        {"the state": last.flips} if agreed else {}
    )
    said = ", ".join(f"{what} changed {units.counted(count, 'time')}" for what, count in counts.items())
    if last.watched_s < LEAST_S:
        rates = f"less than {LEAST_S / 60:.0f} min, so no rate per hour"
    else:
        each = (f"{count * HOUR_S / last.watched_s:,.1f}" for count in counts.values())
        rates = f"{' and '.join(each)} per hour"
    return f"{last.name}: in {units.seconds(last.watched_s)} {said} ({rates})"


def _frames(model: CurrentModel, camera: Camera) -> Iterator[tuple[Predictor, Array, int, int]]:
    """Yield predictors with samples [1, ...] for them, the number of each, and how many newer ones there are."""
    while frame := camera.newest():
        predictor = model.current()
        image = _image(frame, predictor.manifest.input)
        yield predictor, image, frame.number, camera.grabbed - frame.number


def _windows(model: CurrentModel, stream: Stream) -> Iterator[tuple[Predictor, Array, int, int]]:
    """Yield samples as `_frames`; the release before predicts on if a new one takes another kind of samples."""
    predictor = model.current()
    if (kind := predictor.manifest.input.kind) == "picture":
        raise InputError(f"stream {stream.name}: the release takes pictures; expected --camera", NOTHING)
    taken = enumerate(samples(stream, predictor.manifest.input), 1)
    while item := next(taken, None):
        yield predictor, item[1], item[0], stream.waiting.qsize()
        newer = model.current()
        input = newer.manifest.input
        if input.kind != kind:
            words = f"release {newer.manifest.release} takes {ABOUT[input.kind].samples}, the stream has {ABOUT[kind].samples}"
            stream.say("release", f"{words}; release {predictor.manifest.release} predicts on")
        else:
            if input != predictor.manifest.input:
                taken = enumerate(samples(stream, input), item[0] + 1)
            predictor = newer


def _image(frame: Frame, input: InputSpec) -> Array:
    """The frame as the extractor's input [1, C, H, W]."""
    if input.channels == 1:
        planes = pictures.grey(frame.pixels)[None]
    else:
        planes = frame.pixels.transpose(2, 0, 1)
    return pictures.fit(planes[None], input)
