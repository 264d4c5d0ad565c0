"""Images of the same kind are no drift, others are."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl_devices.features import drift

RNG = np.random.default_rng(5)
Z = RNG.normal(size=(200, 8)).astype(np.float32) * 3 + 1


def test_images_of_the_same_kind_are_no_drift_and_others_are() -> None:
    fitted = drift.moments("e", Z)
    same = drift.moments("e", RNG.normal(size=(60, 8)).astype(np.float32) * 3 + 1)
    assert drift.score(fitted, same) < drift.THRESHOLD / 2
    assert drift.score(fitted, drift.moments("e", Z[:60] + 3)) == pytest.approx(1.0, abs=0.3)
    assert drift.score(fitted, drift.moments("e", Z[:10] + 30)) == 0.0  # too few images
    assert drift.score(fitted, drift.moments("other", Z + 30)) == 0.0


def test_a_fit_on_a_few_images_says_nothing_about_the_kind() -> None:
    seen = drift.moments("e", Z[100:])
    assert [drift.score(drift.moments("e", Z[row : row + 2]), seen) for row in range(0, 60, 2)] == [0.0] * 30
    assert drift.score(drift.moments("e", Z[:10]), drift.moments("e", Z[100:] + 6)) > drift.THRESHOLD


def test_features_that_hardly_varied_in_the_fit_do_not_count() -> None:
    """A frozen backbone has features that are almost always 0 on a few pictures of one kind."""
    rare = np.where(RNG.random((200, 1)) < 0.01, 1.0, 0.0).astype(np.float32)
    rare[:40] = 0
    rare[0] = 1e-3
    z = np.concatenate([Z, rare], axis=1)
    assert drift.score(drift.moments("e", z[:40]), drift.moments("e", z[40:])) < drift.THRESHOLD


def test_moments_of_two_parts_are_those_of_the_whole() -> None:
    parts = drift.joined(drift.moments("e", Z[:80]), drift.moments("e", Z[80:]))
    whole = drift.moments("e", Z)
    np.testing.assert_allclose(parts.mean, whole.mean, atol=1e-5)
    np.testing.assert_allclose(parts.variance, whole.variance, rtol=1e-5)


def test_the_same_fit_again_does_not_forget_what_was_seen(tmp_path: Path) -> None:
    drift.remember_fit(tmp_path, drift.moments("e", Z))
    drift.remember_seen(tmp_path, drift.moments("e", Z + 30))
    drift.remember_fit(tmp_path, drift.moments("e", Z))
    assert drift.measured(tmp_path) > drift.THRESHOLD
    drift.remember_fit(tmp_path, drift.moments("e", Z + 30))
    assert drift.measured(tmp_path) == 0.0
