"""Limits of pictures; separate from `pictures`, so that who passes them on does not load Pillow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from edge_fl.capability import total_memory_mb

MB = 1024**2
SHARE = 1 / 2
"""Of the board's memory for decoding one picture; the rest is for the system, the agent and an extractor."""
LEAST_BYTES, MOST_BYTES = 128 * MB, 512 * MB


@dataclass(frozen=True)
class PictureLimits:
    """Limits of the pictures of one source.

    max_bytes: of all pictures together as arrays. max_decoding_bytes: of what decoding one of them takes; None: `board_bytes`. max_pixels:
    of one picture as stored, for the sake of time; above it the memory would allow a JPEG only.
    """

    max_images: int = 100_000
    max_pixels: int = 300_000_000
    max_bytes: int = 2 * 1024**3
    max_decoding_bytes: int | None = None

    @property
    def decoding_bytes(self) -> int:
        """What decoding one picture may take."""
        return board_bytes() if self.max_decoding_bytes is None else self.max_decoding_bytes


@cache  # the memory of a board does not change
def board_bytes() -> int:
    """What decoding one picture may take on this board: a share of its memory, whatever is free now, so that the data stay the same."""
    return int(min(MOST_BYTES, max(LEAST_BYTES, SHARE * total_memory_mb() * MB)))


LIMITS = PictureLimits()
