"""Frames of a camera, a stream or a video file: a thread reads all of them and hands over only the newest.

The thread decodes and converts a frame only while a caller waits for one, so a slow extractor never works on a frame that is older than
the last one read. OpenCV reads V4L2 devices, RTSP, HTTP and files; picamera2, where it is installed, reads the cameras of a Raspberry Pi.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl import threads
from edge_fl.console.output import print_status
from edge_fl.errors import ConnectError, InputError
from edge_fl.files.paths import text
from edge_fl_devices.config import CROP, EXPECTED_CROP

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
EXPECTED = "expected the number of a camera, an rtsp:// or http:// address, or a video file"
NOTHING = "nothing was predicted"
MAX_FPS = 1000.0
FFMPEG_LOG = "OPENCV_FFMPEG_LOGLEVEL"  # environment variable, read when cv2 is imported; -8 is silent


@dataclass(frozen=True, slots=True)
class CameraLimits:
    """An attempt to open a stream and to read a frame end after `timeout_s`; the pause before the next attempt doubles up to a maximum."""

    timeout_s: float = 5.0
    min_retry_s: float = 0.5
    max_retry_s: float = 30.0


LIMITS = CameraLimits()


@dataclass(frozen=True, eq=False, slots=True)
class Frame:
    """A frame as RGB pixels [H, W, 3] and its number, from 1; numbers without a frame were skipped."""

    number: int
    pixels: Pixels


class Region(NamedTuple):
    """A part of a frame, in its pixels; `x`, `y`: of the upper left corner, from 0."""

    x: int
    y: int
    width: int
    height: int

    @classmethod
    def parsed(cls, given: str) -> Region:
        """Parse "x,y,w,h". Raises InputError for another form."""
        found = CROP.fullmatch(given)
        if not found:
            raise InputError(f"crop {given[:100]!r}: {EXPECTED_CROP}", NOTHING)
        return cls(*map(int, found.groups()))

    def of(self, pixels: Pixels, name: str) -> Pixels:
        """The region of a frame [H, W, 3] of the camera `name`. Raises InputError if the frame is smaller."""
        (height, width), right, bottom = pixels.shape[:2], self.x + self.width, self.y + self.height
        if right > width or bottom > height:
            raise InputError(
                f"camera {name}: crop {','.join(map(str, self))} reaches to {right}, {bottom}; its frames have {width} x {height} pixels,"
                f" expected x + w at most {width} and y + h at most {height}",
                "the frame was not used",
            )
        return np.ascontiguousarray(pixels[self.y : bottom, self.x : right])


class Camera:
    """Reads `source` in a thread, of its frames the region `crop` ("x,y,w,h", "": all). An interrupted camera or stream is opened again,
    a file ends.

    Raises InputError for a missing camera, file or package, ConnectError for a stream that does not answer.
    """

    def __init__(
        self,
        source: str,
        *,
        crop: str = "",
        limits: CameraLimits = LIMITS,
        notify: Callable[[str], None] = print_status,
    ) -> None:
        self._region = Region.parsed(crop) if crop else None
        self.name, self.grabbed, self.interrupted = shown(source), 0, False
        self._address, self._limits, self._notify = source, limits, notify
        self._source = _open(source, limits)
        self._changed = threading.Condition()
        self._wanted = self._ended = False
        self._frame: Frame | None = None
        self._stopped = threading.Event()
        self._thread = threads.once(self._run, "edge-fl-camera")
        self._thread.start()

    def newest(self) -> Frame | None:
        """Wait for the next frame, skipping those before it; None after the end of a file. Raises InputError if it is too small to crop."""
        frame = self._newest()
        if frame and self._region:
            return Frame(frame.number, self._region.of(frame.pixels, self.name))
        return frame

    def close(self) -> None:
        """End the thread and release the camera."""
        self._stopped.set()
        self._thread.join(self._limits.timeout_s)
        self._end()

    def _newest(self) -> Frame | None:
        with self._changed:
            self._wanted, self._frame = True, None
            self._changed.wait_for(lambda: self._frame or self._ended)
            self._wanted = False
            return self._frame

    def _run(self) -> None:
        try:
            started_s, first = time.monotonic(), self.grabbed
            while not self._stopped.is_set():
                if not self._grab():
                    if self._source.fps or not self._reopen():
                        return
                    continue
                if self._source.fps:
                    due_s = started_s + (self.grabbed - first) / self._source.fps
                    self._stopped.wait(max(0.0, due_s - time.monotonic()))
        finally:
            self._source.close()
            self._end()

    def _grab(self) -> bool:
        """Grab a frame and hand it over if one is wanted; any exception of the library that reads is an interruption."""
        try:
            if not self._source.grab():
                return False
            self.grabbed += 1
            if self._wanted:
                self._hand_over()
        except Exception:
            log.exception("camera %s: unexpected error", self.name)
            return False
        return True

    def _hand_over(self) -> None:
        pixels = self._source.retrieve()
        if pixels is None:
            return
        with self._changed:
            self._frame = Frame(self.grabbed, pixels)
            self._wanted = False
            self._changed.notify_all()

    def _reopen(self) -> bool:
        """Open the source again, with pauses, until it succeeds or the camera is closed."""
        self.interrupted = True
        self._notify(f"camera {self.name}: interrupted; trying again")
        pause_s = self._limits.min_retry_s
        while not self._stopped.wait(pause_s):
            self._source.close()
            try:
                self._source = _open(self._address, self._limits)
            except Exception as error:
                if not isinstance(error, InputError | ConnectError):
                    log.exception("camera %s: unexpected error", self.name)
                pause_s = min(2 * pause_s, self._limits.max_retry_s)
            else:
                self.interrupted = False
                self._notify(f"camera {self.name}: frames again")
                return True
        return False

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class _OpenCv:
    """A V4L2 device, a stream or a file, read by OpenCV; `fps` is 0 unless frames must be read at this rate."""

    def __init__(self, cv2: Any, source: str, limits: CameraLimits) -> None:
        self._cv2, self.fps = cv2, 0.0
        if source.isdecimal():
            self._capture = cv2.VideoCapture(int(source), cv2.CAP_V4L2, [cv2.CAP_PROP_BUFFERSIZE, 1])
        else:
            timeout_ms = int(1000 * limits.timeout_s)
            settings = [
                cv2.CAP_PROP_OPEN_TIMEOUT_MSEC,
                timeout_ms,
                cv2.CAP_PROP_READ_TIMEOUT_MSEC,
                timeout_ms,
            ]
            self._capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, settings)
        self.opened = bool(self._capture.isOpened())
        if (
            self.opened and not source.isdecimal() and "://" not in source
        ):  # a file is played at its own speed
            fps = float(self._capture.get(cv2.CAP_PROP_FPS))
            self.fps = fps if math.isfinite(fps) and 0 < fps <= MAX_FPS else 25.0

    def grab(self) -> bool:
        """Wait for the next frame; False at the end or when it was interrupted."""
        return bool(self._capture.grab())

    def retrieve(self) -> Pixels | None:
        """Convert the frame grabbed last; None if it is damaged."""
        found, pixels = self._capture.retrieve()
        return np.asarray(self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB), np.uint8) if found else None

    def close(self) -> None:
        self._capture.release()


class _PiCamera:
    """A camera of a Raspberry Pi, read by picamera2 (libcamera), which returns the newest frame itself."""

    def __init__(self, picamera2: Any, number: int) -> None:
        self.fps = 0.0
        self._camera = picamera2.Picamera2(number)
        # libcamera names formats by their bytes in reverse order: BGR888 is an array of RGB
        self._camera.configure(self._camera.create_video_configuration({"format": "BGR888"}, buffer_count=2))
        self._camera.start()
        self._pixels: Pixels | None = None

    def grab(self) -> bool:
        try:
            self._pixels = np.asarray(self._camera.capture_array("main"), np.uint8)
        except RuntimeError:
            return False
        return True

    def retrieve(self) -> Pixels | None:
        return self._pixels

    def close(self) -> None:
        self._camera.close()


def _open(source: str, limits: CameraLimits) -> _OpenCv | _PiCamera:
    if source.isdecimal():
        picamera2 = _module("picamera2")
        if picamera2 and int(source) < len(picamera2.Picamera2.global_camera_info()):
            return _PiCamera(picamera2, int(source))
    elif "://" not in source and not Path(source).is_file():
        raise InputError(f"camera {source}: no such file; {EXPECTED}", NOTHING)
    os.environ.setdefault(FFMPEG_LOG, "-8")
    cv2 = _module("cv2")
    if cv2 is None:
        raise InputError(
            "a camera needs pip install 'edge-fl[camera]' (opencv-python-headless is not installed)", NOTHING
        )
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # errors are raised as one line
    opened = _OpenCv(cv2, source, limits)
    if opened.opened:
        return opened
    opened.close()
    if source.isdecimal():
        known = ", ".join(sorted(text(path.name) for path in Path("/dev").glob("video*"))) or "none"
        raise InputError(
            f"camera {source}: /dev/video{source} cannot be opened (devices: {known}); {EXPECTED}", NOTHING
        )
    if "://" in source:
        raise ConnectError(
            f"camera {shown(source)}: no video stream (waited at most {limits.timeout_s:g} s)", NOTHING
        )
    raise InputError(f"camera {source}: not a video that can be read; {EXPECTED}", NOTHING)


def _module(name: str) -> Any:
    """A package that may be missing; None then."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def shown(source: str) -> str:
    """The source without user name and password."""
    return re.sub(r"(?<=://)[^/@]*@", "", source)
