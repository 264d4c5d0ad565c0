"""Limits of pictures and the depth of 16-bit ones; separate from `pictures`, so that who passes them on does not load Pillow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from edge_fl.process_limits import total_memory_mb

MB = 1024**2
SHARE = 1 / 2
"""Of the board's memory for decoding one picture; the rest is for the system, the agent and an extractor."""
LEAST_BYTES, MOST_BYTES = 128 * MB, 512 * MB
FULL_BITS = 16


@dataclass(frozen=True)
class FileLimits:
    """Limits of the pictures of one source.

    max_bytes: of all pictures together as arrays. max_decoding_bytes: of what decoding one of them takes; None: `board_bytes`. max_pixels:
    of one picture as stored, for the sake of time; above it the memory would allow a JPEG only.
    """

    max_samples: int = 100_000
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


LIMITS = FileLimits()


class Depth(NamedTuple):
    """The bits that the 16-bit pictures of a source use, 0 if it has none; `colour`: whether one of them has colours."""

    bits: int = 0
    colour: bool = False

    @property
    def scale(self) -> int:
        """The bits, or 0 where pixels are those of pictures that use all of them."""
        return self.bits % FULL_BITS

    @property
    def remark(self) -> str:
        """What the owner should know, or ""."""
        if self.bits in (0, FULL_BITS):
            return ""
        lost = (
            ", of which colour pictures keep the upper 8 of 16: store them as 8 bits" if self.colour else ""
        )
        return f"16-bit pictures use {self.bits} bits: scaled by {1 << FULL_BITS - self.bits}{lost}"


UNKNOWN_DEPTH = Depth()
"""Of a source without 16-bit pictures."""
