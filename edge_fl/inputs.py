"""Input of an extractor: the form of one sample, declared in recipes and manifests.

Training, export and devices prepare a sample alike.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

ChannelValues = Annotated[tuple[float, ...], Meta(max_length=16)]
Resize = Literal["crop", "letterbox", "stretch"]
MAX_SIDE = 4096
MAX_CHANNELS = 16


class InputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One sample: its shape, the meaning of each dimension, and how raw values become the extractor's input.

    axes: one letter per dimension of `shape`: C channels, H height, W width, T time, F features. This version supports pictures, "CHW".
    dtype: of stored samples; uint8 is divided by 255, float32 is used as it is.
    mean, std: per channel, of the values after that division; applied inside the extractor.
    resize: how a picture gets the size H x W: "crop" scales its shorter side and cuts out the centre, "letterbox" scales its longer
    side and fills the rest with the mean colour, "stretch" ignores its aspect ratio.
    """

    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=4)]
    mean: ChannelValues = (0.5,)
    std: ChannelValues = (0.5,)
    axes: Annotated[str, Meta(pattern=r"^[CHWTF]{1,4}\Z")] = "CHW"
    dtype: Literal["uint8", "float32"] = "uint8"
    resize: Resize = "crop"

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or len(set(self.axes)) < len(self.axes):
            raise ValueError(
                f"shape {list(self.shape)} with axes {self.axes!r}: expected one letter per dimension"
            )
        if self.is_picture and (self.channels > MAX_CHANNELS or max(self.shape[1:]) > MAX_SIDE):
            raise ValueError(
                f"shape {list(self.shape)}: expected at most {MAX_CHANNELS} channels of {MAX_SIDE}x{MAX_SIDE}"
            )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std {list(self.std)}: expected values above 0")

    @property
    def is_picture(self) -> bool:
        """Whether samples are uint8 [C, H, W]."""
        return self.axes == "CHW" and self.dtype == "uint8"

    @property
    def channels(self) -> int:
        return self._size("C")

    @property
    def height(self) -> int:
        return self._size("H")

    @property
    def width(self) -> int:
        return self._size("W")

    def _size(self, axis: str) -> int:
        return self.shape[self.axes.index(axis)]
