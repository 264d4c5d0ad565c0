"""Figures are legible in print: width, fonts, contrast, and colours that differ to colour-blind readers; SVG and PDF have real text."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from numpy.typing import NDArray

from edge_fl_lab.report import style
from tests.lab.report.test_plots import DRAWN

SHEETS = {"light": "#ffffff", "dark": "#1a1c1f"}
LEAST_CONTRAST = 3.0  # WCAG 2.2, 1.4.11: graphical objects
LEAST_DISTANCE = 10.0  # M. Okabe and K. Ito's eight colours have 7.6
# G. M. Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), severity 1; linear RGB.
SEEN_BY = {
    "normal vision": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
# B. Ottosson, "A perceptual color space for image processing" (2020): linear RGB -> cone responses -> Oklab.
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour: str) -> NDArray[np.float64]:
    channels = np.array(to_rgb(colour))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("colours", "sheet"), [(style.COLOURS, "light"), (style.DARK, "dark")])
def test_every_colour_has_enough_contrast(colours: tuple[str, ...], sheet: str) -> None:
    assert (
        min(contrast(colour, SHEETS[sheet]) for colour in (*colours, *(style.QUIET,) * (sheet == "light")))
        >= LEAST_CONTRAST
    )
    assert len(style.COLOURS) == len(style.DARK)


@pytest.mark.parametrize("vision", SEEN_BY)
def test_colours_differ_to_every_reader(vision: str) -> None:
    seen = [
        100 * OKLAB @ np.cbrt(CONES @ np.clip(SEEN_BY[vision] @ linear(colour), 0, 1))
        for colour in style.COLOURS
    ]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > LEAST_DISTANCE


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_fits_one_column_and_its_text_is_large_enough(name: str, tmp_path: Path) -> None:
    picture = DRAWN[name]()
    style.save(picture, tmp_path, name)
    texts = [text for text in picture.findobj(Text) if text.get_text() and text.get_visible()]
    assert picture.get_figwidth() == style.COLUMN and picture.get_figheight() < 9
    assert min(text.get_fontsize() for text in texts) >= style.LEAST_POINTS
    assert not any(re.search(r"\$.*[\^_]", text.get_text()) for text in texts)  # an exponent would be smaller
    bounds = picture.get_tightbbox()
    assert bounds.x0 >= -0.02 and bounds.y0 >= -0.02
    assert bounds.x1 <= picture.get_figwidth() + 0.02 and bounds.y1 <= picture.get_figheight() + 0.02
    svg = (tmp_path / f"{name}.svg").read_text()
    assert svg.count("<text") > 3  # text, not paths
    pdf = (tmp_path / f"{name}.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf  # TrueType
    width, _ = map(float, re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf).groups())  # type: ignore[union-attr]
    assert width == pytest.approx(72 * style.COLUMN)
