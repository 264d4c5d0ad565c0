"""Which picture is being decoded, and which ones end a process, in a file that survives its death: FOLDER/decoding.

A decoder may end its process (SIGSEGV, or SIGKILL for memory). The picture that the marker names is only a suspect then, because the
extractor works at the same time, and a process may be ended for other reasons. So the next process decodes it first, alone (`settle`). If
that one is ended, too, the picture is fatal: it is skipped from then on, until its file changes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_fl.files.shared import make_folder, open_private
from edge_fl.modalities import UnusableFileError
from edge_fl_devices.data.location import file_digest

FILE = "decoding"
FATAL = "its decoding ended the process twice"
MOST_FATAL = 1000
_NOTHING, _DECODING, _ALONE = b"-", b"D", b"A"
_DIGEST_BYTES = 16
_HEAD_BYTES = 1 + _DIGEST_BYTES  # what is being decoded, and its digest; after them the digests of fatal ones


def _digest(path: Path) -> bytes:
    return file_digest(path, path.stat())


def is_held(folder: Path) -> bool:
    """Whether a process has the marker in a folder."""
    try:
        file = os.open(folder / FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


class DecodingMarker:
    """The marker in a folder; None: nothing is marked. Of several processes the first one has it; the others neither read nor write it.

    suspect: digest of the file during whose decoding the last process ended, b"" if there is none. digest: tells files apart, of
    _DIGEST_BYTES; it may raise OSError.
    """

    def __init__(self, folder: Path | None, digest: Callable[[Path], bytes] = _digest) -> None:
        self.suspect, self._fatal = b"", frozenset[bytes]()
        self._digest, self._file = digest, -1
        if folder is None:
            return
        with suppress(OSError):  # a folder that cannot be written: no marker
            make_folder(folder, 0o700)
            file = open_private(folder / FILE, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return
            self._file = file
            self._load()

    def is_fatal(self, path: Path) -> bool:
        """Whether decoding this file has ended two processes."""
        with suppress(OSError):
            return bool(self._fatal) and self._digest(path) in self._fatal
        return False

    def settle(self, files: Iterable[Path], decode: Callable[[Path], object]) -> None:
        """Decode the suspect alone, if it is one of these files: this process ends if the picture is to blame."""
        for path in files if self.suspect else ():
            with suppress(OSError, UnusableFileError):
                if self._digest(path) == self.suspect:
                    with self.of(path, alone=True):
                        decode(path)
        self.suspect = b""

    @contextmanager
    def of(self, path: Path, *, alone: bool = False) -> Iterator[None]:
        """Name a file as long as the block runs. Not flushed to the disk: it need not survive a power cut."""
        if self._file < 0:
            yield
            return
        with suppress(OSError):
            os.pwrite(self._file, (_ALONE if alone else _DECODING) + self._digest(path), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                os.pwrite(self._file, _NOTHING, 0)

    def close(self) -> None:
        """Let another process have the marker."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _load(self) -> None:
        """Read the file, and add to the fatal pictures one that ended the last process alone."""
        left = os.pread(self._file, _HEAD_BYTES + MOST_FATAL * _DIGEST_BYTES, 0)
        what, digest, fatal = left[:1], left[1:_HEAD_BYTES], left[_HEAD_BYTES:]
        known = [fatal[at : at + _DIGEST_BYTES] for at in range(0, len(fatal), _DIGEST_BYTES)]
        if what == _ALONE:
            known = [digest, *known][:MOST_FATAL]
            os.pwrite(self._file, b"".join(known), _HEAD_BYTES)
            os.pwrite(self._file, _NOTHING, 0)
        self.suspect = digest if what == _DECODING else b""
        self._fatal = frozenset(known)
