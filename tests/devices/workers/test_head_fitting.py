"""A head is fitted in a child process, so that the agent stays small and survives its errors."""

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.errors import DataError, DeadlineError
from edge_fl.heads.auto import CANDIDATES, HeldOut
from edge_fl_devices.workers.head_fitting import ChildFitter, FitData, FitLimits, FitSpec, fit_here

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(60, 8)).astype(np.float32)
Y: NDArray[np.int64] = (Z[:, 0] > 0).astype(np.int64) + 2 * (Z[:, 1] > 0)
GIVEN = FitData(Z, Y)
SHA = "b" * 64


def spec(kind: str = "mlp", classes: int = 5) -> FitSpec:
    return FitSpec(kind, classes, unit_norm=False, extractor=SHA, seed=4)


@pytest.fixture
def fitter() -> Iterator[ChildFitter]:
    """One child for the cheap cases."""
    fitter = ChildFitter(keep=True)
    yield fitter
    fitter.close()


@pytest.mark.parametrize("kind", ["logistic", "svm", "mlp"])
def test_a_child_fits_the_same_head_as_this_process(kind: str, fitter: ChildFitter) -> None:
    here, there = fit_here(spec(kind), GIVEN).head, fitter(spec(kind), GIVEN).head
    assert (there.kind, there.extractor, there.classes) == (kind, SHA, 5)
    assert np.allclose(there.logits(Z), here.logits(Z), atol=1e-5) and (there.predict(Z) == Y).mean() > 0.9


def test_a_calibration_comes_with_the_head_if_requested(fitter: ChildFitter) -> None:
    request = msgspec.structs.replace(spec("nearest"), calibrate=True)
    here, there = fit_here(request, GIVEN).calibration, fitter(request, GIVEN).calibration
    assert len(there.right) == 60 and 0.7 < there.accuracy < 1 and there.temperature != 1
    assert np.allclose(there.confidences, here.confidences, atol=1e-5)
    assert np.allclose(there.promise.thresholds, here.promise.thresholds, atol=1e-5)
    assert not len(fitter(spec("nearest"), GIVEN).calibration.right)
    chosen = fitter(msgspec.structs.replace(spec("auto"), calibrate=True), GIVEN)
    assert chosen.calibration.accuracy > 0.7


def test_a_client_with_one_class_gets_a_constant_head(fitter: ChildFitter) -> None:
    head = fitter(spec("svm"), FitData(Z, np.full(60, 3))).head
    assert head.kind == "constant" and set(head.predict(Z)) == {3}


def test_unusable_data_are_rejected_and_the_child_continues(fitter: ChildFitter) -> None:
    with pytest.raises(DataError, match="labels range"):
        fitter(spec(classes=2), GIVEN)
    assert fitter(spec(), GIVEN).head.kind == "mlp"


def test_a_child_that_takes_too_long_is_ended() -> None:
    with pytest.raises(DeadlineError, match=r"no progress for 0.01 s"):
        ChildFitter(FitLimits(deadline_s=0.01))(spec(), GIVEN)


def test_a_child_that_needs_too_much_memory_is_only_an_error() -> None:
    with pytest.raises(MemoryError, match="head"):
        ChildFitter(FitLimits(max_address_mb=32))(spec(), GIVEN)


def test_fitting_in_a_child_leaves_no_scikit_learn_here() -> None:
    script = """
import sys, numpy as np
from edge_fl_devices.workers.head_fitting import ChildFitter, FitData, FitSpec
ChildFitter()(FitSpec("svm", 3, False, "c" * 64), FitData(np.eye(6, dtype="float32"), np.arange(6) % 3))
print([name for name in sys.modules if name.split(".")[0] in ("sklearn", "scipy", "torch")])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_auto_returns_its_measurements(fitter: ChildFitter) -> None:
    held = HeldOut(Z[40:], Y[40:])
    found = fitter(spec("auto"), FitData(Z[:40], Y[:40], held=held))
    tried = {name: found.numbers[f"auto.{name}.validation_acc"] for name in CANDIDATES}
    assert found.head.kind == max(tried, key=tried.__getitem__) and max(tried.values()) > 0.7
