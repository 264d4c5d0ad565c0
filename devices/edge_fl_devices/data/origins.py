"""Origins of pictures: when one was taken, and of which recording it is a frame, from its file's name, EXIF data, or the file's time.

Pictures of one minute, and frames of one recording, belong together (`edge_fl.data.grouping`).

- A name may contain the time (IMG_20240131_142530.jpg, 2024-01-31 14.25.30.png), or be NAME_frame_0001.jpg: NAME is the recording.
- EXIF: DateTimeOriginal of a JPEG, if it is later than 1990 (cameras without a clock write less).
- The file's time is when the picture was written. That is when it was taken if a camera wrote it, and when it was copied if not. A copy
  writes many files at once, so the times of a minute count only if at most MOST_OF_A_MINUTE pictures have one in it, at least APART_S
  apart. Bursts are faster, and are found by their near duplicates instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups

if TYPE_CHECKING:  # the agent itself decodes no pictures
    from edge_fl.data.pictures import Header

MINUTE_S = 60
MOST_OF_A_MINUTE = 12
APART_S = 1.0
FIRST_YEAR = 1990
NAMED_TIME = re.compile(
    r"(?<!\d)(\d{4})[-_.:]?(\d\d)[-_.:]?(\d\d)[-_.:T ]?(\d\d)[-_.:h]?(\d\d)[-_.:m]?(\d\d)(?:[-_.]?\d{3})?(?!\d)"
)
FRAME = re.compile(r"(.+?)[-_. ]+frame[-_. ]*\d+", re.IGNORECASE)


class Origin(NamedTuple):
    """Where a picture comes from: when it was taken, in seconds since 1970 of whatever time zone.

    certain: not only the time of its file. recording: name of the recording that the picture is a frame of, or "". side: its shorter side
    in pixels.
    """

    seconds: float
    certain: bool = False
    recording: str = ""
    side: int = grouping.SMALL


def origin(path: Path, header: Header) -> Origin:
    """Return the origin of a picture file by its name and header."""
    frame = FRAME.fullmatch(path.stem)
    taken = _seconds(NAMED_TIME.search(path.stem)) or _seconds(NAMED_TIME.match(header.taken))
    return Origin(taken or header.written_s, taken > 0, frame[1] if frame else "", min(header.size))


def grouped(origins: Sequence[Origin]) -> Groups:
    """Group pictures by minute and recording."""
    if not origins:
        return grouping.alone()
    seconds = np.array([each.seconds for each in origins])
    certain = np.array([each.certain for each in origins])
    minutes = (seconds // MINUTE_S).astype(np.int64)
    uncertain = np.where(certain, -1, minutes)
    order = np.lexsort((seconds, uncertain))
    for rows in np.split(order, np.flatnonzero(np.diff(uncertain[order])) + 1):
        if len(rows) > MOST_OF_A_MINUTE or (np.diff(seconds[rows]) < APART_S).any():
            uncertain[rows] = -1
    numbers = {name: number for number, name in enumerate({each.recording for each in origins} - {""})}
    recordings = np.array([numbers.get(each.recording, -1) for each in origins], np.int64)
    return grouping.joined(np.where(certain, minutes, -1), uncertain, recordings)


def _seconds(found: re.Match[str] | None) -> float:
    """The time of a match of NAMED_TIME, in seconds since 1970; 0 if it is none."""
    if not found:
        return 0.0
    try:
        taken = datetime(*map(int, found.groups()), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError:
        return 0.0
    return taken.timestamp() if taken.year >= FIRST_YEAR else 0.0
