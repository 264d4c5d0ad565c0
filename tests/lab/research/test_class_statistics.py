"""Class-Statistics on digits: what the prior gains with one label per class."""

import numpy as np
from sklearn.datasets import load_digits

from edge_fl_lab.research import run

NAME = "class-statistics"


def test_with_one_label_per_class_it_is_far_better_than_without_the_prior() -> None:
    found = load_digits()
    images, labels = np.rint(found.images * 15.9375).astype(np.uint8)[:, None], found.target
    accuracy = {
        prior: run(
            NAME,
            images,
            labels,
            clients=8,
            rounds=1,
            settings={"data.shots": 1, "method.options": {"prior": prior}},
        ).accuracy.mean()
        for prior in (True, False)
    }
    assert accuracy[True] >= accuracy[False] + 0.1
