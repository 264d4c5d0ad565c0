"""Heads are fitted on one client's features, predict with NumPy alone, survive the disk, and serve one extractor only."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from edge_fl import heads, metrics
from edge_fl.data import datasets
from edge_fl.errors import ArtefactError, ConfigError, DataError
from edge_fl.heads import mlp
from edge_fl.heads.head import LEAST_SPREAD

DIGITS = datasets.load("digits", Path("nowhere")).samples.take(np.random.default_rng(0).permutation(1797))
PIXELS = DIGITS.x.reshape(len(DIGITS), -1).astype(np.float32) / 255
UNIT = PIXELS / np.linalg.norm(PIXELS, axis=1, keepdims=True)
TRAIN, TEST = slice(0, 200), slice(200, 600)
LEARNING = ["logistic", "svm", "mlp", "nearest"]
EXTRACTOR = "ab" * 32


def fit(
    kind: str, rows: np.ndarray | slice = TRAIN, *, unit_norm: bool = False, **options: object
) -> heads.Head:
    z = UNIT if unit_norm else PIXELS
    return heads.fit(kind, z[rows], DIGITS.y[rows], 10, unit_norm=unit_norm, extractor=EXTRACTOR, **options)  # type: ignore[arg-type]


def only(*classes: int, n: int = 60) -> np.ndarray:
    return np.flatnonzero(np.isin(DIGITS.y, classes))[:n]


@pytest.mark.parametrize("unit_norm", [False, True])
@pytest.mark.parametrize(
    ("kind", "floor"), [("logistic", 0.90), ("svm", 0.85), ("mlp", 0.90), ("nearest", 0.80)]
)
def test_every_kind_learns_real_digits(kind: str, floor: float, unit_norm: bool) -> None:
    head = fit(kind, unit_norm=unit_norm)
    assert metrics.accuracy(head.predict((UNIT if unit_norm else PIXELS)[TEST]), DIGITS.y[TEST]) > floor


@pytest.mark.parametrize("kind", LEARNING)
def test_features_on_any_scale_are_learned(kind: str) -> None:
    z = PIXELS * 300 + 1000
    head = heads.fit(kind, z[TRAIN], DIGITS.y[TRAIN], 10, unit_norm=False)
    assert metrics.accuracy(head.predict(z[TEST]), DIGITS.y[TEST]) > 0.80


@pytest.mark.parametrize("classes", [(3, 8), (1, 3, 8)])
def test_weights_reproduce_what_scikit_learn_decides(classes: tuple[int, ...]) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    rows = only(*classes)
    mean, std = PIXELS[rows].mean(0), PIXELS[rows].std(0)
    u = (PIXELS - mean) / np.maximum(std, LEAST_SPREAD * np.sqrt(np.mean(std**2)))
    wanted = LogisticRegression(C=1.0, max_iter=2000).fit(u[rows], DIGITS.y[rows])
    logits = fit("logistic", rows).logits(PIXELS[TEST])[:, list(classes)].astype(np.float64)
    share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.abs(share - wanted.predict_proba(u[TEST])).max() < 1e-3
    svm = LinearSVC(C=1.0, dual="auto", random_state=0, max_iter=10_000).fit(UNIT[rows], DIGITS.y[rows])
    logits = fit("svm", rows, unit_norm=True).logits(UNIT[TEST])[:, list(classes)]
    decision = logits[:, 1] - logits[:, 0] if len(classes) == 2 else logits
    assert np.abs(decision - svm.decision_function(UNIT[TEST])).max() < 1e-3


@pytest.mark.parametrize("kind", ["logistic", "svm", "nearest"])
def test_classes_that_a_client_never_saw_are_impossible_and_ids_stay_global(kind: str) -> None:
    head = fit(kind, only(2, 7, 9))
    logits = head.logits(PIXELS[TEST])
    assert logits.shape == (400, 10)
    assert logits.dtype == np.float32
    assert np.isneginf(logits[:, [0, 1, 3, 4, 5, 6, 8]]).all()
    assert np.isfinite(logits[:, [2, 7, 9]]).all()
    rows = np.flatnonzero(np.isin(DIGITS.y, [2, 7, 9]))[60:200]
    assert metrics.accuracy(head.predict(PIXELS[rows]), DIGITS.y[rows]) > 0.9


def test_the_mlp_has_a_logit_for_every_class() -> None:
    assert np.isfinite(fit("mlp", only(2, 7)).logits(PIXELS[TEST])).all()


@pytest.mark.parametrize("kind", LEARNING)
def test_a_client_with_one_class_gets_a_constant_head(kind: str) -> None:
    head = fit(kind, only(7))
    assert isinstance(head, heads.Constant)
    assert set(head.predict(PIXELS[TEST])) == {7}
    assert head.extractor == EXTRACTOR


def test_the_constant_kind_predicts_the_commonest_class() -> None:
    head = heads.fit("constant", np.zeros((3, 2)), np.array([1, 4, 4]), 5, unit_norm=False)
    assert head.predict(np.zeros((2, 2), np.float32)).tolist() == [4, 4]


@pytest.mark.parametrize("kind", LEARNING)
def test_one_sample_per_class_is_enough_to_fit(kind: str) -> None:
    rows = np.array([int(np.flatnonzero(DIGITS.y == label)[0]) for label in (4, 6)])
    head = fit(kind, rows)
    assert head.predict(PIXELS[rows]).tolist() == [4, 6]


@pytest.mark.parametrize("kind", [*LEARNING, "constant"])
def test_the_order_of_the_samples_does_not_matter(kind: str) -> None:
    shuffled = np.random.default_rng(0).permutation(200)
    first, again = fit(kind, np.arange(200)), fit(kind, shuffled)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(first.to_arrays().values(), again.to_arrays().values(), strict=True)
    )


def test_only_the_mlp_depends_on_the_seed() -> None:
    changed = {
        kind
        for kind in LEARNING
        if not np.array_equal(fit(kind, seed=0).logits(PIXELS), fit(kind, seed=1).logits(PIXELS))
    }
    assert changed == {"mlp"}


@pytest.mark.parametrize("kind", ["logistic", "svm", "mlp"])
def test_balanced_heads_find_rare_classes_more_often(kind: str) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [190, 10])
    z = rng.normal(size=(200, 4)).astype(np.float32) + y[:, None] * 0.8
    fresh = rng.normal(size=(500, 4)).astype(np.float32) + 0.8
    found = [
        heads.fit(kind, z, y, 2, unit_norm=False, balanced=balanced).predict(fresh).mean()
        for balanced in (False, True)
    ]
    assert found[1] > found[0] + 0.1


@pytest.mark.parametrize(("samples", "steps"), [(5, 300), (200, 300), (320, 300), (1000, 320), (1001, 320)])
def test_the_mlp_takes_ten_epochs_but_at_least_300_steps(samples: int, steps: int) -> None:
    batches = list(mlp._batches(samples, np.random.default_rng(0)))
    assert len(batches) == steps
    epoch = np.concatenate(batches[: -(-samples // min(32, samples))])
    assert sorted(epoch.tolist()) == list(range(samples))


def test_the_mlps_gradient_is_the_slope_of_its_loss() -> None:
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=shape) for shape in ((4, 3), (4,), (2, 4), (2,))]
    u, y, cost = rng.normal(size=(5, 3)), np.array([0, 1, 1, 0, 1]), rng.uniform(0.5, 2, 5)

    def loss() -> float:
        logits = np.maximum(u @ layers[0].T + layers[1], 0) @ layers[2].T + layers[3]
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return float(-(cost * logits[np.arange(5), y]).mean())

    for layer, grad in zip(
        layers, mlp._gradient(layers, u, y, cost, np.zeros((5, len(layers[3])))), strict=True
    ):
        for index in np.ndindex(layer.shape):
            layer[index] += 1e-6
            up = loss()
            layer[index] -= 2e-6
            down = loss()
            layer[index] += 1e-6
            assert grad[index] == pytest.approx((up - down) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("kind", [*LEARNING, "constant"])
def test_a_head_survives_bytes_bit_for_bit(kind: str) -> None:
    head = fit(kind, only(0, 1, 2))
    stored = save(head.to_arrays())
    again = heads.from_arrays(load(stored), head.describe())
    assert type(again) is type(head)
    assert np.array_equal(again.logits(PIXELS[TEST]), head.logits(PIXELS[TEST]))
    assert again.describe() == head.describe() == {"kind": kind, "extractor": EXTRACTOR, "classes": "10"}


def test_a_kind_that_can_be_chosen_is_fitted_by_its_class_and_one_that_only_serves_cannot_be_chosen() -> None:
    serving = {kind for kind, head in heads.KINDS.items() if not hasattr(head, "fit")}
    assert serving == {"fleet", "fleet-cosine", "fleet-mlp"}
    assert all(issubclass(heads.find(kind), heads.FittableHead) for kind in heads.names())
    for place in ("edge_fl.heads.fleet:Fleet", "edge_fl.heads.residual:FleetMlp"):
        with pytest.raises(ConfigError, match="expected a subclass of"):
            heads.resolve(place)


def test_a_head_refuses_every_extractor_but_its_own() -> None:
    head = fit("nearest")
    head.require(EXTRACTOR)
    with pytest.raises(
        ArtefactError,
        match=r"nearest head: fitted on extractor abababab, used with cdcdcdcd; a new head must be fitted",
    ):
        head.require("cd" * 32)


@pytest.mark.parametrize(
    ("change", "metadata"),
    [
        ({"weights": np.zeros((3, 65), np.float32)}, {}),
        ({"weights": np.zeros((4, 64), np.float32)}, {}),
        ({"weights": np.zeros((3, 64))}, {}),
        ({"bias": np.zeros((3, 1), np.float32)}, {}),
        ({"bias": np.array([0, np.nan, 0], np.float32)}, {}),
        ({"present": np.array([0, 1, 10])}, {}),
        ({"present": np.array([0, 1, 1])}, {}),
        ({"present": np.array([-1, 0, 1])}, {}),
        ({"more": np.zeros(1, np.float32)}, {}),
        ({}, {"kind": "mlp"}),
        ({}, {"kind": "forest"}),
        ({}, {"classes": "-3"}),
        ({}, {"classes": "2"}),
        ({}, {"classes": ""}),
    ],
)
def test_a_damaged_head_is_refused(change: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    head = fit("logistic", only(0, 1, 2))
    with pytest.raises(ArtefactError, match=r"head.*not used"):
        heads.from_arrays({**head.to_arrays(), **change}, {**head.describe(), **metadata})


@pytest.mark.parametrize(
    ("z", "y", "message"),
    [
        (np.zeros((0, 4)), np.zeros(0, int), "expected"),
        (np.zeros((2, 4)), np.zeros(3, int), "expected"),
        (np.zeros((2, 4)), np.zeros(2), "expected"),
        (np.zeros((2, 4)), np.array([0, 3]), r"labels range over 0\.\.3, expected 0\.\.2"),
        (np.array([[0.0], [np.inf]]), np.array([0, 1]), "1 of 2 feature rows have NaN"),
    ],
)
def test_features_and_labels_that_cannot_be_used_are_refused(
    z: np.ndarray, y: np.ndarray, message: str
) -> None:
    with pytest.raises(DataError, match=f"head: .*{message}.*no head was fitted"):
        heads.fit("logistic", z, y, 3, unit_norm=False)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'logistik' is unknown \(did you mean 'logistic'\?\)"):
        fit("logistik")


@pytest.mark.parametrize("kind", LEARNING)
def test_features_of_another_width_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match=r"shape \[2, 3\], expected \[n, 64\]"):
        fit(kind).predict(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("kind", ["logistic", "svm"])
def test_a_solver_that_does_not_converge_gives_a_head_and_no_warning(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"logistic": "sklearn.linear_model.LogisticRegression", "svm": "sklearn.svm.LinearSVC"}[kind]
    module, _, cls = name.rpartition(".")
    original = getattr(sys.modules[module], cls)
    monkeypatch.setattr(name, lambda **options: original(**{**options, "max_iter": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(kind, unit_norm=True).predict(UNIT[TEST])


def test_predicting_needs_neither_scikit_learn_nor_torch() -> None:
    code = """
import sys
for name in ("sklearn", "scipy", "torch"):
    sys.modules[name] = None
import numpy as np
from edge_fl import heads
z = np.zeros((2, 3), np.float32)
arrays = {n: np.zeros(s, np.float32) for n, s in (("weights", (2, 3)), ("bias", 2), ("mean", 3))}
arrays |= {"std": np.ones(3, np.float32), "present": np.array([1, 3])}
head = heads.from_arrays(arrays, {"kind": "svm", "extractor": "", "classes": "4"})
print(head.predict(z).tolist(), heads.fit("nearest", np.eye(3), np.arange(3), 3, unit_norm=True).kind)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[1, 1] nearest", done.stderr
