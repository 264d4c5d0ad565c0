"""Numbered frames: as a video file, and as an MJPEG stream over HTTP."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from edge_fl_maker.capture.camera import FFMPEG_LOG

os.environ.setdefault(FFMPEG_LOG, "-8")  # as the product does before its import
import cv2

BLOCK, SIDE = 16, 4


def numbered(number: int) -> np.ndarray:
    """A grey picture [64, 64, 3] of 16 blocks, white for the bits of its number."""
    bits = np.array([number >> bit & 1 for bit in range(SIDE * SIDE)], np.uint8).reshape(SIDE, SIDE)
    return np.repeat(np.kron(bits * 255, np.ones((BLOCK, BLOCK), np.uint8))[:, :, None], 3, axis=2)


def number_of(pixels: np.ndarray) -> int:
    """The number in a picture [64, 64, 3]."""
    bits = pixels[BLOCK // 2 :: BLOCK, BLOCK // 2 :: BLOCK, 0] > 127
    return int((bits.ravel().astype(int) << np.arange(SIDE * SIDE)).sum())


def write_video(path: Path, frames: int, fps: float) -> Path:
    """An MJPEG file with frames numbered from 1."""
    return write_frames(path, map(numbered, range(1, frames + 1)), fps, (BLOCK * SIDE, BLOCK * SIDE))


def write_frames(path: Path, frames: Iterable[np.ndarray], fps: float, size: tuple[int, int]) -> Path:
    """An MJPEG file with these frames [H, W, 3]; size: W and H."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), fps, size)
    for frame in frames:
        writer.write(frame)
    writer.release()
    return path


class Stream:
    """An endless stream whose frames are numbered in the order of sending; every connection ends after `length` of them.

    It can be `held`: then it sends the frames that are asked for.
    """

    def __init__(self, fps: float, length: int) -> None:
        self.sent = self.connections = 0
        self.fps, self.length = fps, length
        self.stopped = threading.Event()
        self.held, self._asked, self._changed = False, 0, threading.Condition()

    def hold(self) -> None:
        with self._changed:
            self.held, self._asked = True, 0

    def send(self, frames: int) -> None:
        """Send this many frames of a held stream, and wait until they are sent."""
        with self._changed:
            self._asked += frames
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._asked, 60)

    def flow(self) -> None:
        """End the hold."""
        with self._changed:
            self.held = False
            self._changed.notify_all()

    def may_send(self) -> bool:
        """Wait for the time of the next frame; False once the stream is stopped."""
        if self.stopped.wait(1 / self.fps):
            return False
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self._asked or self.stopped.is_set())
            return not self.stopped.is_set()

    def count(self) -> None:
        """One more frame was sent."""
        with self._changed:
            self._asked = max(0, self._asked - 1)
            self._changed.notify_all()


@contextmanager
def streaming(fps: float = 50.0, length: int = 10_000) -> Iterator[tuple[str, Stream]]:
    """Serve a stream; yields its address."""
    stream = Stream(fps, length)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stream.connections += 1
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            try:
                for _ in range(stream.length):
                    if not stream.may_send():
                        return
                    stream.sent += 1
                    buffer = BytesIO()
                    Image.fromarray(numbered(stream.sent)).save(buffer, "jpeg", quality=95)
                    head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {buffer.tell()}\r\n\r\n"
                    self.wfile.write(head.encode() + buffer.getvalue() + b"\r\n")
                    stream.count()
            except OSError:
                pass  # the client has gone

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/stream", stream
    finally:
        stream.stopped.set()
        stream.flow()
        server.shutdown()
        thread.join()
        server.server_close()
