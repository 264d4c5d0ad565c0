"""A sample of the study of the shown accuracy: devices show about what is true of unseen images, and their intervals cover it."""

from collections.abc import Sequence

import numpy as np
import pytest

from tools.study import shown_accuracy
from tools.study.shown_accuracy import CLASSES, RELEASES, Extractor

DRAWS = 40


@pytest.fixture(scope="module")
def extractors() -> Sequence[Extractor]:
    return [shown_accuracy.extractor(seed) for seed in range(4)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("labels", [3, 10])
def test_a_device_shows_what_is_true(release: str, labels: int, extractors: Sequence[Extractor]) -> None:
    found = [*shown_accuracy.draws(extractors, RELEASES[release], CLASSES, labels, DRAWS)]
    off = [draw.shown - draw.true for draw in found]
    # of 40 draws: three points and twice the mean's standard error; 32 intervals or more
    assert abs(np.mean(off)) < 0.03 + 2 * np.std(off) / DRAWS**0.5
    assert sum(draw.covered for draw in found) >= 0.8 * DRAWS
    assert np.mean([draw.width for draw in found]) < 7 * np.std(
        off
    )  # 3.3 for a normal distribution; of 20 draws std is 16 % off
    assert np.mean([draw.error for draw in found]) <= shown_accuracy.ERROR
    assert np.mean([draw.true for draw in found]) > 0.8


def test_the_table_has_a_line_for_each_release_and_number_of_labels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_accuracy, "LABELS", (2,))
    shown_accuracy.main(["--draws", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 2 * len(RELEASES)
