"""Features are computed once per extractor and image set, and kept for their owner alone."""

from __future__ import annotations

import stat

import numpy as np
import pytest

from edge_fl_devices.features.cache import FeatureCache, fingerprint
from edge_fl_devices.features.extractor import Extractor
from tests.devices.graphs import WEIGHTS, graph, images, manifest_for, on_disk


class Counting(Extractor):
    runs = 0

    def run(self, images):
        self.runs += 1
        return super().run(images)


@pytest.fixture
def counting(tmp_path):
    payload = graph()
    return Counting(on_disk(tmp_path, payload), manifest_for(payload))


def test_features_are_computed_once_and_survive_a_restart(tmp_path, counting):
    first = FeatureCache(tmp_path / "cache").features(counting, images(5))
    again = FeatureCache(tmp_path / "cache").features(counting, images(5))
    assert counting.runs == 1
    assert np.array_equal(first, again)


def test_new_data_and_a_new_extractor_never_meet_old_features(tmp_path, counting):
    cache = FeatureCache(tmp_path / "cache")
    cache.features(counting, images(5))
    cache.features(counting, images(5, seed=1))
    assert counting.runs == 2
    payload = graph(weights=2 * WEIGHTS)
    newer = Extractor(on_disk(tmp_path, payload), manifest_for(payload))
    np.testing.assert_allclose(
        cache.features(newer, images(5)), 2 * cache.features(counting, images(5)), atol=1e-5
    )
    assert counting.runs == 2


def test_the_cache_keeps_the_entries_used_last(tmp_path, counting):
    cache = FeatureCache(tmp_path / "cache", entries=2)
    for seed in (1, 2, 1, 3):  # 2 is the one not used for longest
        cache.features(counting, images(5, seed))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    runs = counting.runs
    cache.features(counting, images(5, 1))
    assert counting.runs == runs
    cache.features(counting, images(5, 2))
    assert counting.runs == runs + 1


@pytest.mark.parametrize("garbage", [b"", b"\x93NUMPY", b"\x80\x04pickle", b"x" * 500])
def test_a_damaged_cache_file_is_computed_again(tmp_path, counting, garbage):
    cache = FeatureCache(tmp_path / "cache")
    good = cache.features(counting, images(5))
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(garbage)
    assert np.array_equal(cache.features(counting, images(5)), good)
    assert counting.runs == 2


def test_features_are_for_their_owner_alone(tmp_path, counting):
    FeatureCache(tmp_path / "cache").features(counting, images(5))
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_a_fingerprint_sees_shape_and_pixels():
    x = images(4)
    assert fingerprint(x) == fingerprint(x.copy())
    assert fingerprint(x) == fingerprint(np.asfortranarray(x))
    assert len({fingerprint(y) for y in (x, x[:3], x.reshape(2, 2, 4, 4), 255 - x)}) == 4
