"""What a data source is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from devices.data.pictures import LIMITS, Limits
from edge_fl.config import InputSpec
from edge_fl.data.samples import Samples

Policy = Literal["newest", "reservoir"]


@dataclass(frozen=True)
class DataSpec:
    """What the images are for: class names in the order of their ids, and the images that the extractor takes.

    Before the first release neither is known: without classes the source's own count, without `input` all images must be of one shape.
    `resize` lets pictures of another size be made to fit. `only` names the classes that this device keeps to, () for all; `keep` is how
    many images it works with at most (0: all), and `policy` which: the newest, or a fair sample of all that ever came (reservoir).
    """

    classes: tuple[str, ...] = ()
    input: InputSpec | None = None
    resize: bool = True
    limits: Limits = LIMITS
    only: tuple[str, ...] = ()
    keep: int = 0
    policy: Policy = "newest"


UNKNOWN = DataSpec()
"""Before the first release."""


@dataclass(frozen=True)
class SourceData:
    """What a source holds: all its samples, or, when the source splits them itself, train, test and perhaps validation samples.

    `skipped` counts files by the reason why they were left out; `examples` names the first of them.
    """

    classes: tuple[str, ...]
    samples: Samples
    validation: Samples | None = None
    test: Samples | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
