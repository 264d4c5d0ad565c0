"""A device's images, read in batches and forgotten: only their labels and their places in the split are kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.data.limits import LIMITS
from edge_fl.data.samples import Array, ClientData, Labels, Samples
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl_devices.data.origins import Origin
from edge_fl_devices.data.picture_index import PictureFacts, PictureIndex, groups_of
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.data.sources import resized
from edge_fl_devices.data.spec import Pictures, SourceData, Wants
from edge_fl_devices.data.split import SPLIT, DeviceSplit, Sets, key, position


def _unchanged(report: DataReport) -> DataReport:
    return report


class ImageStream:
    """Iterate over it once, completely, or over its `pictures`; afterwards `labels`, `sets` and `report` are known.

    labels: class ids int64 [n] in the order of reading. groups: which images belong together [n], empty if all are alone. sets: the rows
    of the three sets in that order. `where` begins the messages of errors, `remember` completes the report.
    """

    labels: Labels
    groups: Groups
    sets: Sets
    report: DataReport

    def __init__(
        self,
        content: SourceData,
        split: DeviceSplit = SPLIT,
        where: str = "",
        remember: Callable[[DataReport], DataReport] = _unchanged,
        index: PictureIndex | None = None,
    ) -> None:
        self.index, self.total = index, content.total
        self._content, self._split, self._where, self._remember = content, split, where, remember

    @classmethod
    def of(cls, data: ClientData, classes: Sequence[str], input: InputSpec) -> "ImageStream":
        """Stream the three sets of data in memory, resized to `input`."""
        sets = (data.train, data.validation, data.test)
        sizes = (len(data.train), len(data.validation), len(data.test))
        batches, side = resized(sets, input, "this device's data"), min(data.train.shape[1:])
        return cls(SourceData(tuple(classes), lambda wants: batches, sizes, side=side))

    @property
    def bits(self) -> int:
        """Bits that the 16-bit pictures use; 0 if there are none."""
        return self._content.depth.bits

    def __iter__(self) -> Iterator[Samples]:
        """Read the images in batches. Raises DataError, also without training images or for a label without a class."""
        for batch in self.pictures():
            yield Samples(batch.x, batch.y)

    def pictures(self, wants: Wants = lambda key: True) -> Iterator[Pictures]:
        """As iterating, with the facts of each picture; the pixels of known ones that `wants` does not want are left out."""
        content = self._content
        labels: list[Labels] = [np.empty(0, np.int64)]
        facts: list[PictureFacts] = []
        for batch in content.batches(wants):
            if isinstance(batch, Samples):
                batch = Pictures(batch.y, batch.x, np.arange(len(batch)), [PictureFacts()] * len(batch))
            if any(not each.key for each in batch.facts):
                known = zip(batch.facts, batch.x, strict=True)
                batch = replace(
                    batch, facts=[facts_of(image, self._split.key, each.origin) for each, image in known]
                )
            facts += batch.facts
            labels.append(batch.y)
            yield batch
        self.labels = np.concatenate(labels)
        self.groups = groups_of(facts, content.side, content.groups)
        if content.sizes is None:
            times = [each.origin.seconds for each in facts if each.origin]
            self.sets = self._split.sets([each.position for each in facts], self.groups, times)
        else:
            self.sets = _consecutive(content.sizes)
        if not len(self.sets[0]):
            raise DataError(f"{self._where}no training samples on this device")
        classes = len(content.classes)
        if self.labels.max() >= classes:
            raise DataError(f"{self._where}labels up to {self.labels.max()}, expected {classes} classes")
        counts = tuple(np.bincount(self.labels, minlength=classes).tolist())
        report = DataReport(
            content.classes,
            counts,
            content.skipped,
            content.hints,
            names=content.skipped.names,
            depth=content.depth,
        )
        self.report = self._remember(report.with_groups(self.labels, self.groups))


def facts_of(image: Array, split_key: bytes, origin: Origin | None = None) -> PictureFacts:
    """Return what the split and the fit need of an image [C, H, W]."""
    thumbnail = grouping.thumbnails(image[None]).tobytes()
    return PictureFacts(key(image), position(image, split_key), thumbnail=thumbnail, origin=origin)


def _consecutive(sizes: tuple[int, int, int]) -> Sets:
    train, validation, test = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:2])
    return train, validation, test


def collect(stream: ImageStream, most_bytes: int = LIMITS.max_bytes) -> ClientData:
    """Read all images into memory. Raises DataError."""
    images, held = [], 0
    for batch in stream:
        images.append(batch.x)
        held += batch.x.nbytes
        if held > most_bytes:
            raise DataError(f"images of more than {most_bytes >> 20} MB in memory, expected less; set keep")
    every = Samples(np.concatenate(images), stream.labels)
    return ClientData(*(every.take(rows) for rows in stream.sets))
