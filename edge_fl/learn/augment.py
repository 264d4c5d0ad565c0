"""Augmentations as pure functions of samples and a key: of images x float32 [B, C, H, W] in 0..1, and one of samples of any kind.

Parameters are drawn per sample; flip, crop, scale and rotation are one affine resampling.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from edge_fl.errors import MethodError
from edge_fl.learn.random import fold, normal, uniform

Augmentation = Callable[[Tensor, Tensor], Tensor]  # (x, key) -> x


def none(x: Tensor, key: Tensor) -> Tensor:
    """No augmentation."""
    return x


def crop(x: Tensor, key: Tensor) -> Tensor:
    """A random box of 20 to 100 % of the area, aspect 3/4 to 4/3, resized to the full image."""
    return _affine(x, *_random_box(x, key, 0.2))


def gentle(x: Tensor, key: Tensor) -> Tensor:
    """A box of 60 to 100 % of the area and up to 15 degrees of rotation; for digits and other images that must not be flipped."""
    scale_x, scale_y, shift_x, shift_y = _random_box(x, key, 0.6)
    angle = (uniform(fold(key, 9), len(x)) * 2 - 1) * (math.pi / 12)
    return _affine(x, scale_x, scale_y, shift_x, shift_y, angle)


def flip_rotate(x: Tensor, key: Tensor) -> Tensor:
    """Horizontal flip with probability one half and up to 15 degrees of rotation (DualFed)."""
    one, zero = torch.ones(len(x), device=x.device), torch.zeros(len(x), device=x.device)
    angle = (uniform(fold(key, 9), len(x)) * 2 - 1) * (math.pi / 12)
    return _affine(x, one * _signs(x, key), one, zero, zero, angle)


def supcon(x: Tensor, key: Tensor) -> Tensor:
    """Crop, flip, colour jitter (0.4, 0.4, 0.4, 0.1 with probability 0.8) and greyscale (0.2), as usual in contrastive learning."""
    scale_x, scale_y, shift_x, shift_y = _random_box(x, key, 0.2)
    x = _affine(x, scale_x * _signs(x, key), scale_y, shift_x, shift_y)
    return _greyscale(_jitter(x, fold(key, 20)), fold(key, 21))


def jitter(x: Tensor, key: Tensor) -> Tensor:
    """Each channel times 1 + 0.1 n, each value times 1 + 0.05 n, n normal: scaling and jitter of sensors (Um et al., ICMI 2017)."""
    own = normal(fold(key, 30), *x.shape[:-1], 1)
    found = x * (1 + 0.1 * own) * (1 + 0.05 * normal(fold(key, 31), *x.shape))
    return found.clamp(0, 1) if x.dim() == 4 else found


def hide_patches(x: Tensor, key: Tensor, share: float, fill: Tensor, patch: int = 4) -> Tensor:
    """Replace floor(share * P) of the P patches of each sample by `fill` [C, 1, 1] (FedRIR; 4x4 pixels [C]).

    Patches are drawn per sample; of samples that are no images [B, C, H, W] they are 4 values of the last dimension, of all channels.
    Values beyond the last whole patch are never hidden.
    """
    height, tall = (x.shape[2], patch) if x.dim() == 4 else (1, 1)
    rows, columns = height // tall, x.shape[-1] // patch
    drawn = uniform(key, len(x), rows * columns)
    hidden = drawn.argsort(1).argsort(1) < math.floor(share * rows * columns + 1e-9)
    grid = hidden.reshape(-1, 1, rows, columns).repeat_interleave(tall, 2).repeat_interleave(patch, 3)
    grid = F.pad(grid.to(x.dtype), (0, x.shape[-1] - columns * patch, 0, height - rows * tall))
    if x.dim() < 4:
        grid = grid.reshape(len(x), *(1 for _ in x.shape[1:-1]), -1)
    return torch.where(grid > 0, fill, x)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": none,
    "crop": crop,
    "gentle": gentle,
    "flip-rotate": flip_rotate,
    "supcon": supcon,
    "jitter": jitter,
}
FOR_ALL = ("none", "jitter")
"""Augmentations of samples of any kind; the others are of images."""


def augmented(name: str, x: Tensor, key: Tensor) -> Tensor:
    """Apply the augmentation `name`. Raises MethodError for one of images on other samples."""
    if x.dim() != 4 and name not in FOR_ALL:
        shape = ", ".join(map(str, x.shape[1:]))
        raise MethodError(
            f"augment {name!r} is for pictures, not for samples [{shape}]: expected {' or '.join(FOR_ALL)}"
        )
    return AUGMENTATIONS[name](x, key)


def _signs(x: Tensor, key: Tensor) -> Tensor:
    return torch.where(uniform(fold(key, 8), len(x)) < 0.5, -1.0, 1.0)


def _random_box(x: Tensor, key: Tensor, smallest: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale and shift per image of a box inside it, as fractions of the image."""
    area, aspect, left, top = (uniform(fold(key, i), len(x)) for i in range(4))
    ratio = torch.exp((aspect * 2 - 1) * math.log(4 / 3))
    side = torch.sqrt(smallest + (1 - smallest) * area)
    width, height = (side * ratio.sqrt()).clamp(max=1), (side / ratio.sqrt()).clamp(max=1)
    return width, height, (left * 2 - 1) * (1 - width), (top * 2 - 1) * (1 - height)


def _affine(
    x: Tensor, scale_x: Tensor, scale_y: Tensor, shift_x: Tensor, shift_y: Tensor, angle: Tensor | None = None
) -> Tensor:
    cos = torch.ones_like(scale_x) if angle is None else torch.cos(angle)
    sin = torch.zeros_like(scale_x) if angle is None else torch.sin(angle)
    across = _centres(x.shape[3], x.device)[None, None, :]
    down = _centres(x.shape[2], x.device)[None, :, None]

    def along(cx: Tensor, cy: Tensor, shift: Tensor) -> Tensor:
        return cx[:, None, None] * across + cy[:, None, None] * down + shift[:, None, None]

    grid = [along(scale_x * cos, -scale_y * sin, shift_x), along(scale_x * sin, scale_y * cos, shift_y)]
    return F.grid_sample(x, torch.stack(grid, dim=-1), padding_mode="reflection", align_corners=False)


def _centres(pixels: int, device: torch.device) -> Tensor:
    """Pixel centres of a side in -1..1 [pixels], as F.affine_grid computes them, which does not run under vmap."""
    return (torch.arange(pixels, device=device) * 2 + 1) / pixels - 1


def _jitter(x: Tensor, key: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, each by a random factor, on 80 % of the images."""
    draw = [uniform(fold(key, i), len(x)).reshape(-1, 1, 1, 1) * 2 - 1 for i in range(4)]
    y = (x * (1 + 0.4 * draw[0])).clamp(0, 1)
    mean = _grey(y).mean((2, 3), keepdim=True)
    y = (mean + (y - mean) * (1 + 0.4 * draw[1])).clamp(0, 1)
    if x.shape[1] == 3:
        grey = _grey(y)
        y = _turn_hue((grey + (y - grey) * (1 + 0.4 * draw[2])).clamp(0, 1), draw[3] * (0.1 * 2 * math.pi))
    return torch.where(uniform(fold(key, 4), len(x)).reshape(-1, 1, 1, 1) < 0.8, y, x)


def _greyscale(x: Tensor, key: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x
    return torch.where(uniform(key, len(x)).reshape(-1, 1, 1, 1) < 0.2, _grey(x).expand_as(x), x)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device).reshape(1, 3, 1, 1)
    return (x * weights).sum(1, keepdim=True)


def _turn_hue(x: Tensor, angle: Tensor) -> Tensor:
    """Rotation about the grey axis by `angle` [B, 1, 1, 1] (Rodrigues)."""
    cos, sin = torch.cos(angle), torch.sin(angle)
    mean = x.mean(1, keepdim=True)
    turned = x.roll(1, dims=1) - x.roll(2, dims=1)
    return (x * cos + mean * (1 - cos) + turned * (sin / math.sqrt(3))).clamp(0, 1)
