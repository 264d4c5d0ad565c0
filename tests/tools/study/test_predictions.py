"""Calibration and answers under a promise on unseen pictures of PACS, with the real weights of EfficientNet-Lite0."""

from pathlib import Path

import numpy as np
import pytest

from tests.tools.study.pacs import DATA, needs_backbone, needs_pacs
from tools.study import predictions
from tools.study.predictions import DOMAINS, LABELS, Pictures, measured

PICTURES, SEEDS = 300, 8


def test_the_tables_of_separable_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(7, 24))
    for domain in DOMAINS:
        y = np.arange(210) % 7
        z = (centres[y] + 0.3 * rng.normal(size=(210, 24))).astype(np.float32)
        np.savez(tmp_path / f"{domain}-210.npz", z=z, y=y)
    predictions.main(["--out", str(tmp_path), "--pictures", "210", "--seeds", "1", "--heads", "cosine"])
    shown = capsys.readouterr().out
    assert "| 20 | cosine | 1.000 |" in shown and "4 devices" in shown and "classes left out" in shown


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
@needs_pacs
@needs_backbone
def test_probabilities_and_precision_hold_on_unseen_pictures_of_pacs(tmp_path: Path) -> None:
    domains: dict[str, Pictures] = {
        domain: predictions.features(domain, DATA, tmp_path, PICTURES) for domain in DOMAINS
    }
    for labels in LABELS:
        found = [each for seed in range(SEEDS) for each in measured(domains, labels, "cosine", seed)]
        assert np.mean([each.values["accuracy"] for each in found]) >= {5: 0.60, 20: 0.72}[labels]
        precision = np.nanmean([each.values["precision 0.9"] for each in found])
        assert abs(precision - 0.9) <= 0.03
        assert predictions.pooled_error(found) <= 0.08
