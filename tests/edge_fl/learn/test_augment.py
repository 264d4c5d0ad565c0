"""Augmentations: pure, drawn per image, values within 0..1, and the intended transformation."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from edge_fl.learn.augment import AUGMENTATIONS, crop, flip_rotate, gentle, hide_patches, supcon
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
