"""The section `[capture]` of a device's settings."""

import re
from typing import Annotated

from msgspec import Meta, Struct

MB = 2**20
SOURCE = re.compile(r"camera:\d+|(rtsps?|https?)://\S+|watch:/.+")


class CaptureConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where pictures without labels come from, and how many are kept.

    `source` is "camera:NUMBER", the address of a stream (rtsp:// or http://), or "watch:/FOLDER", whose new pictures are copied; "": none.
    `every_s` is the shortest time between two pictures of one source, and the interval of looks into a watched folder. `max_pictures` and
    `max_mb` both limit the pool; the disk may hold less, of which a part stays free (`pool.SPARE_BYTES`).
    """

    source: str = ""
    every_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 10.0
    max_pictures: Annotated[int, Meta(ge=1)] = 500
    max_mb: Annotated[float, Meta(gt=0)] = 200.0

    def __post_init__(self) -> None:
        if self.source and not SOURCE.fullmatch(self.source):
            raise ValueError(
                f"source {self.source!r}: expected camera:0, rtsp://..., http://... or watch:/folder"
            )

    @property
    def max_bytes(self) -> int:
        return int(self.max_mb * MB)
