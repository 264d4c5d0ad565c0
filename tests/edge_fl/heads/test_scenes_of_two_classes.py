"""Scenes of pictures of two classes, as when labelled within a minute: a fit with a fleet's head, and its calibration."""

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.heads import HeadPlan, probability_calibration

RNG = np.random.default_rng(0)
DIMENSIONS, CLASSES = 8, 10
EXTRA = {
    "toy": {
        "weight": RNG.normal(size=(CLASSES, DIMENSIONS)).astype(np.float32),
        "bias": np.zeros(CLASSES, np.float32),
    }
}


@pytest.mark.parametrize("samples", [2, 3, 11])
@pytest.mark.parametrize("scenes", [1, 2])
def test_a_scene_may_hold_several_classes(samples: int, scenes: int) -> None:
    z = RNG.normal(size=(samples, DIMENSIONS)).astype(np.float32)
    y = CLASSES - 1 - np.arange(samples) % CLASSES
    plan = HeadPlan(fleet="toy", shares=(1 / CLASSES,) * CLASSES)
    data = heads.training_set(
        z,
        y,
        classes=CLASSES,
        unit_norm=False,
        extractor="x",
        plan=plan,
        extras=EXTRA,
        groups=np.arange(samples) % scenes,
    )
    found = probability_calibration.of_estimate(heads.estimated("logistic", data), data)
    assert found.scenes <= scenes
    assert 0 < found.correction <= 1
