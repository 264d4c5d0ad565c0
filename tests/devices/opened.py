"""What processes open in folders, by inotify: whether pictures were read, without a change to the code that reads them."""

import ctypes
import os
import struct
from pathlib import Path

IN_OPEN, IN_ACCESS = 0x20, 0x1
EVENT = struct.Struct("iIII")


class Opened:
    """What processes open and list in the folders that it watches, by inotify. Close it after use."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self.descriptor >= 0
        for folder in folders:
            watch = libc.inotify_add_watch(
                self.descriptor, os.fsencode(folder), ctypes.c_uint32(IN_OPEN | IN_ACCESS)
            )
            assert watch >= 0, os.strerror(ctypes.get_errno())

    def close(self) -> None:
        os.close(self.descriptor)

    def read(self) -> list[str]:
        """The names that were opened since the last call; "" for a folder itself."""
        names = []
        try:
            events = os.read(self.descriptor, 2**20)
        except BlockingIOError:
            return []
        while events:
            *_, length = EVENT.unpack_from(events)
            names.append(events[EVENT.size : EVENT.size + length].rstrip(b"\0").decode())
            events = events[EVENT.size + length :]
        return names
