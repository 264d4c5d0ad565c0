"""Memory of processes that hold an extractor."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_MMAP_THRESHOLD = -3  # glibc's malloc.h
BLOCK = 64 * 1024


def return_freed_blocks() -> None:
    """Let malloc return freed blocks above 64 KiB to the system at once; call it before the extractor is loaded.

    Loading EfficientNet-Lite0 peaks 13 MB lower. Without effect where malloc is not glibc's.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, BLOCK)
