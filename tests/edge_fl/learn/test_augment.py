"""Augmentations: pure, drawn per image, values within 0..1, and the intended transformation."""

import math

import pytest
import torch
from torch.func import vmap

from edge_fl.errors import MethodError
from edge_fl.learn.augment import (
    AUGMENTATIONS,
    _jitter,
    _turn_hue,
    augmented,
    crop,
    flip_rotate,
    gentle,
    hide_patches,
    jitter,
    supcon,
)
from edge_fl.learn.random import fold, key_of

KEY = key_of(5)
every = pytest.mark.parametrize("name", AUGMENTATIONS)


def images(number: int = 6, channels: int = 3, side: int = 8) -> torch.Tensor:
    return torch.rand(number, channels, side, side, generator=torch.Generator().manual_seed(1))


@every
@pytest.mark.parametrize("channels", [1, 3, 2])
def test_shape_range_and_input_are_kept(name: str, channels: int) -> None:
    x = images(channels=channels)
    given = x.clone()
    seen = AUGMENTATIONS[name](x, KEY)
    assert seen.shape == x.shape
    assert ((seen >= -1e-6) & (seen <= 1 + 1e-6)).all()
    assert x.equal(given)


@every
def test_the_same_key_gives_the_same_view_and_another_another(name: str) -> None:
    x, view = images(), AUGMENTATIONS[name]
    assert view(x, KEY).equal(view(x, KEY))
    assert view(x, KEY).equal(view(x, fold(KEY, 1))) == (name == "none")


@every
def test_parameters_are_drawn_per_image_independent_of_the_batch(name: str) -> None:
    x, view = images(), AUGMENTATIONS[name]
    assert view(x, KEY)[:3].allclose(view(x[:3], KEY), atol=1e-6)
    alike = view(x[:1].repeat(6, 1, 1, 1), KEY)
    assert (len(alike.flatten(1).unique(dim=0)) == 1) == (name == "none")


@every
def test_under_vmap_every_client_sees_what_it_sees_alone(name: str) -> None:
    x, keys = images(8).reshape(2, 4, 3, 8, 8), torch.stack([KEY, fold(KEY, 1)])
    together = vmap(AUGMENTATIONS[name])(x, keys)
    for place in range(2):
        assert together[place].allclose(AUGMENTATIONS[name](x[place], keys[place]), atol=1e-5)


@pytest.mark.parametrize("view", [crop, gentle, flip_rotate])
def test_geometry_leaves_a_flat_image_flat(view) -> None:  # type: ignore[no-untyped-def]
    flat = torch.full((20, 3, 8, 8), 0.4)
    assert view(flat, KEY).allclose(flat, atol=1e-5)


def test_half_the_images_are_flipped() -> None:
    ramp = torch.linspace(0, 1, 9).expand(400, 1, 9, 9)
    rising = (flip_rotate(ramp, KEY)[..., -3:].mean((1, 2, 3)) > 0.5).float().mean()
    assert 0.42 < float(rising) < 0.58


def test_gentle_never_flips() -> None:
    ramp = torch.linspace(0, 1, 9).expand(200, 1, 9, 9)
    seen = gentle(ramp, KEY)
    assert (seen[..., -3:].mean((1, 2, 3)) > seen[..., :3].mean((1, 2, 3))).all()


def test_a_crop_is_a_part_of_the_image_enlarged() -> None:
    """On a ramp the slope that is seen is the box's share of the width: sqrt(0.2 * 3/4) to 1."""
    ramp = torch.linspace(0, 1, 32).expand(500, 1, 32, 32)
    slope = (crop(ramp, KEY)[:, 0, 16, 24] - crop(ramp, KEY)[:, 0, 16, 8]) / (
        ramp[0, 0, 16, 24] - ramp[0, 0, 16, 8]
    )
    assert float(slope.min()) > 0.37
    assert float(slope.max()) < 1.01
    assert float(slope.min()) < 0.5 < 0.9 < float(slope.max())


@pytest.mark.parametrize(
    ("name", "least", "degrees"), [("crop", 0.2, 0), ("gentle", 0.6, 15), ("flip-rotate", 1, 15)]
)
def test_area_and_angle_of_the_geometry(name: str, least: float, degrees: float) -> None:
    """Of two ramps, the slopes across and down are the columns of the matrix that maps the view to the image."""
    ramp = torch.linspace(0, 1, 32).expand(500, 32, 32)
    seen = AUGMENTATIONS[name](torch.stack([ramp, ramp.mT], dim=1), KEY)
    slopes = [seen[:, :, 16, 24] - seen[:, :, 16, 8], seen[:, :, 24, 16] - seen[:, :, 8, 16]]
    matrix = torch.stack(slopes, dim=-1) / (ramp[0, 0, 24] - ramp[0, 0, 8])
    area = torch.linalg.det(matrix).abs()
    assert least - 0.01 < float(area.min()) < least + 0.05
    assert float(area.max()) < 1.01
    angle = torch.rad2deg(torch.atan2(-matrix[:, 0, 1], matrix[:, 1, 1]))
    assert -degrees - 0.1 < float(angle.min()) <= -0.95 * degrees
    assert 0.95 * degrees <= float(angle.max()) < degrees + 0.1


def test_colours_vary_by_the_usual_amounts_in_four_of_five_views() -> None:
    """Brightness by 40 %, seen on grey; hue by a tenth of a turn, which brightness, contrast and saturation of a flat image keep."""
    grey = supcon(torch.full((500, 3, 4, 4), 0.5), KEY)[:, :, 2, 2]
    assert grey.allclose(grey[:, :1], atol=1e-6)
    assert 0.3 <= float(grey.min()) < 0.31 and 0.69 < float(grey.max()) <= 0.7
    assert 0.14 < float((grey == 0.5).all(1).float().mean()) < 0.26
    colour = torch.tensor([0.5, 0.3, 0.25])
    seen = supcon(colour.reshape(1, 3, 1, 1).expand(500, 3, 4, 4), KEY)[:, :, 2, 2]
    turned = (hue(seen) - hue(colour))[seen.amax(1) - seen.amin(1) > 1e-6]
    assert -36.1 < float(turned.min()) < -34
    assert 34 < float(turned.max()) < 36.1


def test_brightness_ends_at_white_before_the_contrast_changes() -> None:
    """Three quarters of the image are white, so contrast, at least 0.6, raises black to 0.4 of the mean 0.75 at most."""
    x = torch.ones(500, 1, 4, 4)
    x[:, :, 0] = 0
    black = _jitter(x, KEY)[:, 0, 0, 0]
    assert 0.29 < float(black.max()) <= 0.3 + 1e-6


def hue(colours: torch.Tensor) -> torch.Tensor:
    """The angle about the grey axis in degrees; colours [..., 3]."""
    r, g, b = colours.unbind(-1)
    return torch.rad2deg(torch.atan2(math.sqrt(3) * (g - b), 2 * r - g - b))


def test_a_third_of_a_turn_of_the_hue_exchanges_the_channels() -> None:
    x = images()
    assert _turn_hue(x, torch.full((6, 1, 1, 1), 2 * math.pi / 3)).allclose(x.roll(1, dims=1), atol=1e-6)


def test_a_fifth_of_the_views_are_grey_and_their_colour_is_turned_otherwise() -> None:
    colours = torch.tensor([0.9, 0.3, 0.2]).reshape(1, 3, 1, 1).expand(500, 3, 4, 4)
    seen = supcon(colours, KEY)[:, :, 2, 2]
    grey = (seen.max(1).values - seen.min(1).values) < 1e-6
    assert 0.14 < float(grey.float().mean()) < 0.26
    assert len(seen[~grey].unique(dim=0)) > 100


@pytest.mark.parametrize(("side", "hidden", "patches"), [(28, 29, 49), (32, 38, 64), (64, 153, 256)])
def test_the_papers_number_of_patches_is_hidden(side: int, hidden: int, patches: int) -> None:
    x = torch.ones(3, 2, side, side)
    seen = hide_patches(x, KEY, 0.6, torch.zeros(2, 1, 1))
    per_patch = seen.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3).mean((1, 3, 4))
    assert per_patch.shape == (3, patches)
    assert ((per_patch == 0) | (per_patch == 1)).all()  # whole patches, all channels
    assert (per_patch == 0).sum(1).tolist() == [hidden] * 3
    assert not seen[0].equal(seen[1])
    assert hide_patches(x, KEY, 0.0, torch.zeros(2, 1, 1)).equal(x)
    assert (x == 1).all()


def test_pixels_beyond_the_last_whole_patch_are_never_hidden() -> None:
    seen = hide_patches(torch.ones(5, 1, 10, 10), KEY, 1.0, torch.zeros(1, 1, 1))
    assert (seen[:, :, :8, :8] == 0).all()
    assert (seen[:, :, 8:] == 1).all()
    assert (seen[:, :, :, 8:] == 1).all()


@pytest.mark.parametrize("shape", [(6, 3, 20), (6, 20)])
def test_other_samples_than_images_are_jittered_and_hidden_in_time(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    seen = augmented("jitter", x, KEY)
    assert seen.shape == x.shape and 0.02 < (seen - 1).abs().mean() < 0.2 and jitter(x, KEY).equal(seen)
    hidden = hide_patches(x, KEY, 0.6, torch.zeros((*shape[1:-1], 1)))
    assert hidden.shape == x.shape and hidden.reshape(6, -1, 20)[:, 0].sum(1).tolist() == [8.0] * 6
    assert hidden.reshape(6, -1, 5, 4).std((1, 3)).max() == 0


@pytest.mark.parametrize("name", ["crop", "gentle", "flip-rotate", "supcon"])
def test_augmentations_of_images_refuse_other_samples(name: str) -> None:
    with pytest.raises(MethodError, match=rf"augment '{name}' is for pictures, not for samples \[3, 20\]"):
        augmented(name, torch.ones(6, 3, 20), KEY)
