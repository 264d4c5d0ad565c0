"""Sources of pictures without labels: a camera or stream, and a watched folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from edge_fl.data.pictures import SUFFIXES
from edge_fl.errors import DataError
from edge_fl.files.folder import walk
from edge_fl.files.paths import text
from edge_fl_devices.capture_settings import MB
from edge_fl_maker.capture.camera import LIMITS, Camera, CameraLimits
from edge_fl_maker.capture.pool import jpeg

CAMERA, WATCH = "camera:", "watch:"
LARGEST_BYTES = 32 * MB


class Picture(NamedTuple):
    """A picture file and where it comes from."""

    content: bytes
    source: str


class PictureSource(Protocol):
    """An open source."""

    def take(self) -> Iterator[Picture]:
        """Yield the pictures that are there now; one that is not followed by a request for the next is yielded again later."""

    @property
    def interrupted(self) -> bool:
        """Whether the source gives no pictures at present."""

    def close(self) -> None: ...


class CameraPictures:
    """The newest frame of a camera or stream. Raises InputError or ConnectError if it cannot be opened."""

    def __init__(self, address: str, limits: CameraLimits, notify: Callable[[str], None]) -> None:
        self._camera = Camera(address, limits=limits, notify=notify)

    def take(self) -> Iterator[Picture]:
        """Wait for the next frame; none once the camera is closed."""
        if frame := self._camera.newest():
            yield Picture(jpeg(frame.pixels), self._camera.name)

    @property
    def interrupted(self) -> bool:
        return self._camera.interrupted

    def close(self) -> None:
        self._camera.close()


class FolderPictures:
    """New pictures below a folder, which are left there. Raises DataError if it is missing.

    A file of at most LARGEST_BYTES counts once it is unchanged between two looks.
    """

    interrupted = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[Path, tuple[int, int]] = {}
        self._taken: dict[Path, tuple[int, int]] = {}
        self._look()

    def take(self) -> Iterator[Picture]:
        """Yield the new pictures in the order of their names."""
        now = self._look()
        before, self._before = self._before, now
        for path, stamp in now.items():
            if before.get(path) == stamp != self._taken.get(path):
                try:
                    content = path.read_bytes()
                except OSError:
                    continue  # removed, or not readable yet
                yield Picture(content, text(path))
                self._taken[path] = stamp

    def close(self) -> None: ...

    def _look(self) -> dict[Path, tuple[int, int]]:
        if not self._folder.is_dir():
            raise DataError(f"{text(self._folder)}: no such folder; expected one with pictures")
        found = {}
        for path in walk(self._folder).files:
            if path.suffix.lower() in SUFFIXES:
                try:
                    stat = path.stat()
                except OSError:
                    continue
                if stat.st_size <= LARGEST_BYTES:
                    found[path] = (stat.st_size, stat.st_mtime_ns)
        return found


def open_source(source: str, notify: Callable[[str], None], limits: CameraLimits = LIMITS) -> PictureSource:
    """Open the `source` of a capture configuration. Raises InputError or ConnectError."""
    if source.startswith(WATCH):
        return FolderPictures(Path(source.removeprefix(WATCH)))
    return CameraPictures(source.removeprefix(CAMERA), limits, notify)
