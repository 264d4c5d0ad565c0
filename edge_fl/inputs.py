"""Input of an extractor: the form of one sample, declared in recipes, dataset files and manifests.

Training, export and devices prepare a sample alike. What a kind of sample is read from and how, `edge_fl.modalities` knows.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Resize = Literal["crop", "letterbox", "stretch"]
Kind = Literal["picture", "series", "audio", "table"]
Axes = Literal["CHW", "CT", "T", "F"]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
KINDS: dict[str, tuple[Kind, str]] = {
    "CHW": ("picture", "uint8"),
    "CT": ("series", "float32"),
    "T": ("audio", "float32"),
    "F": ("table", "float32"),
}
"""Axes of a sample -> its kind, and the dtype of stored samples."""
MAX_SIDE = 4096
MAX_CHANNELS = 16  # of a picture
MAX_COLUMNS = 1024  # of a series or a table
MAX_TIMES = 2**20
ChannelValues = Annotated[tuple[float, ...], Meta(max_length=MAX_COLUMNS)]


class InputSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sample: its shape, the meaning of each dimension, and how raw values become the extractor's input.

    axes: one letter per dimension of `shape`: "CHW" a picture, "CT" a window of a series with C channels, "T" a mono audio clip, "F" a row
    of a table. dtype: of stored samples; pictures are uint8, which are divided by 255, all others float32, used as they are.
    mean, std: per channel (per column of a table), of the values after that division; applied inside the extractor.
    resize: how a picture gets the size H x W: "crop" scales its shorter side and cuts out the centre, "letterbox" scales its longer
    side and fills the rest with the mean colour, "stretch" ignores its aspect ratio.
    rate: values per second of T, in Hz; a recording with another rate is resampled. hop: values between the starts of two windows of a
    recording. names, units: of the channels or columns; a column of a file is found by its name.
    """

    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=3)]
    mean: ChannelValues = (0.5,)
    std: ChannelValues = (0.5,)
    axes: Axes = "CHW"
    dtype: Literal["uint8", "float32"] = "uint8"
    resize: Resize = "crop"
    rate: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    hop: Annotated[int, Meta(ge=0, le=MAX_TIMES)] = 0
    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_COLUMNS)] = ()
    units: Annotated[tuple[str, ...], Meta(max_length=MAX_COLUMNS)] = ()

    def __post_init__(self) -> None:
        shape, (kind, dtype) = list(self.shape), KINDS[self.axes]
        if len(self.axes) != len(shape):
            raise ValueError(f"shape {shape} with axes {self.axes!r}: expected one number per letter")
        if self.dtype != dtype:
            raise ValueError(f"dtype {self.dtype!r} with axes {self.axes!r}: expected {dtype!r}")
        if kind == "picture" and (self.channels > MAX_CHANNELS or max(shape[1:]) > MAX_SIDE):
            raise ValueError(
                f"shape {shape}: expected at most {MAX_CHANNELS} channels of {MAX_SIDE}x{MAX_SIDE}"
            )
        if kind != "picture" and (self.channels > MAX_COLUMNS or max(shape) > MAX_TIMES):
            raise ValueError(
                f"shape {shape}: expected at most {MAX_COLUMNS} channels or columns and {MAX_TIMES} values of time"
            )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std {list(self.std)}: expected values above 0")
        if {self.rate > 0, self.hop > 0} != {"T" in self.axes}:
            raise ValueError(
                f"rate {self.rate:g}, hop {self.hop} with axes {self.axes!r}: expected both above 0 for a series or audio, else 0"
            )
        for key, values in (("names", self.names), ("units", self.units)):
            if len(values) not in (0, self.channels):
                raise ValueError(f"{len(values)} {key}: expected {self.channels}, one per channel, or none")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names {list(self.names)}: expected different names")

    @property
    def kind(self) -> Kind:
        """What a sample is."""
        return KINDS[self.axes][0]

    @property
    def channels(self) -> int:
        """Channels of a picture or a series, columns of a table; audio has 1."""
        return 1 if self.axes == "T" else self.shape[0]

    @property
    def height(self) -> int:
        return self._size("H")

    @property
    def width(self) -> int:
        return self._size("W")

    @property
    def window(self) -> int:
        """Values of time in a sample of a series or of audio."""
        return self._size("T")

    def _size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]
