"""Limits of pictures; separate from `pictures`, so that who passes them on does not load Pillow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PictureLimits:
    """`max_pixels` applies to one picture as stored, `max_bytes` to all pictures together as arrays."""

    max_images: int = 100_000
    max_pixels: int = 64_000_000
    max_bytes: int = 2 * 1024**3


LIMITS = PictureLimits()
