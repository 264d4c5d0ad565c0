"""Which picture is being decoded, in a file that survives the death of the process: FOLDER/features/decoding.

A decoder may end its process (SIGSEGV, or SIGKILL for memory). The picture that the marker names is only a suspect then, because the
extractor works at the same time, and a process may be ended for other reasons. So the next process decodes it first, alone. If that one
is ended, too, the picture is skipped from then on, until its file changes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_fl.files.shared import make_folder, open_private
from edge_fl_devices.data.location import file_digest

FILE = "decoding"
FATAL = "its decoding ended the process twice"
_NOTHING, _DECODING, _ALONE = b"-", b"D", b"A"
_DIGEST_BYTES = 16


class DecodingMarker:
    """The marker in a folder. Of several processes the first one has it; the others neither read nor write it.

    suspect: digest (`location.file_digest`) of the file during whose decoding the last process ended; guilty: of one that was decoded
    alone; b"" if there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.suspect = self.guilty = b""
        self._file = -1
        with suppress(OSError):  # a folder that cannot be written: no marker
            make_folder(folder, 0o700)
            file = open_private(folder / FILE, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return
            self._file = file
            left = os.pread(file, 1 + _DIGEST_BYTES, 0)
            self.suspect = left[1:] if left[:1] == _DECODING else b""
            self.guilty = left[1:] if left[:1] == _ALONE else b""

    @contextmanager
    def of(self, path: Path, *, alone: bool = False) -> Iterator[None]:
        """Name a file as long as the block runs. Not flushed to the disk: it need not survive a power cut."""
        if self._file < 0:
            yield
            return
        with suppress(OSError):
            digest = file_digest(path, path.stat())
            os.pwrite(self._file, (_ALONE if alone else _DECODING) + digest, 0)
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
