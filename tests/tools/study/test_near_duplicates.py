"""The study of near duplicates on a few pictures of random blocks."""

import numpy as np

from tests.maker.capture.scenes import pixels
from tools.study.near_duplicates import scaled, table


def test_noise_makes_duplicates_and_other_pictures_are_none() -> None:
    photos = [scaled(np.repeat(pixels(number)[:, :, None], 3, axis=2)) for number in range(8)]
    shares = {name: float(share) for name, share in table(photos).rows}
    assert shares["noise of 6 grey levels"] >= 0.8
    assert shares["another picture"] == 0 and shares["an object of 30 % of the side"] <= 0.5
