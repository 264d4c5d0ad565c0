"""Request to a data source and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edge_fl.data.grouping import Groups, alone
from edge_fl.data.samples import Array, Indices, Labels, Samples
from edge_fl.files.paths import composed
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities.limits import LIMITS, UNKNOWN_DEPTH, Depth, FileLimits
from edge_fl_devices.data.file_index import FileIndex, SampleFacts
from edge_fl_devices.data.record import Skipped

Policy = Literal["newest", "reservoir"]
Wants = Callable[[bytes], bool]
"""Whether the values of a sample with this key are needed although its facts are known."""


@dataclass(frozen=True)
class DataSpec:
    """Required form of the data: class names in the order of their ids, and the extractor's input.

    Both are unknown before the first release: then the source's own classes count, and all samples that are read must have one shape.
    `only` lists the classes that this device uses (empty: all), `keep` the maximum number of files of a folder, or of samples of arrays
    (0: all), and `policy` which ones: the newest, or a fair sample of all so far (reservoir).
    `files`: the digests of the files that count (`location.file_digest`); None: all. `index`: what is known of the files, if anything.
    `bits` is how many 16-bit pictures use (0: as many as a sample of them).
    """

    classes: tuple[str, ...] = ()
    input: InputSpec | None = None
    limits: FileLimits = LIMITS
    only: tuple[str, ...] = ()
    keep: int = 0
    policy: Policy = "newest"
    files: frozenset[bytes] | None = None
    index: FileIndex | None = field(default=None, compare=False)
    bits: int = 0

    def __post_init__(self) -> None:
        for key in ("classes", "only"):
            object.__setattr__(self, key, tuple(map(composed, getattr(self, key))))


UNKNOWN = DataSpec()
"""Before the first release."""


@dataclass(frozen=True, eq=False)
class ReadSamples:
    """Some samples in the order of reading: class ids y int64 [n], and what is known of each, if anything.

    x [m, ...] are the values of the `rows` int64 [m]: of all samples, or only of those whose facts are not enough.
    """

    y: Labels
    x: Array
    rows: Indices
    facts: Sequence[SampleFacts] = ()


@dataclass(frozen=True)
class SourceData:
    """Content of a source, in batches to be read once; those of train, validation and test in this order where the source defines a split.

    `sizes` are the numbers of samples of the three sets, None without a split. `skipped` counts unused files by reason, `remarks` used
    ones by what is to be said of their quality; both are complete after the last batch. `hints` suggest classes for folders outside the
    class list.
    `total` is the number of files to read, 0 if it is unknown. Of arrays: the `groups` [n] that one of them gives, empty without one, and
    the shorter `side` of pictures in pixels before they were resized.
    `depth` is that of the 16-bit pictures.
    """

    classes: tuple[str, ...]
    batches: Callable[[Wants], Iterable[Samples | ReadSamples]]
    sizes: Sequence[int] | None = None
    skipped: Skipped = field(default_factory=Skipped)
    hints: tuple[str, ...] = ()
    total: int = 0
    groups: Groups = field(default_factory=alone)
    side: int = 0
    depth: Depth = UNKNOWN_DEPTH
    kind: Kind = "picture"
    remarks: Skipped = field(default_factory=Skipped)
