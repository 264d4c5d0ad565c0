"""Pictures without a label that resemble each other and no class are suggested as a class, named or dismissed with one action."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl.heads.linear import direction
from edge_fl.heads.unknowns import KnownClasses
from edge_fl_maker.labelling.immediate import resembling
from edge_fl_maker.labelling.session import Suggestion
from tests.maker.labelling.fruit import CLASSES, Desk, desk, device, fill, fruit, manifest

LOST = "apple"
LEFT = [name for name in CLASSES if name != LOST]


def labelled(folder: Path, per_class: int = 16) -> None:
    """Pictures in the folders of all classes but one."""
    for label, name in enumerate(CLASSES):
        if name != LOST:
            (folder / name).mkdir(parents=True)
            for number in range(per_class):
                (folder / name / f"{number}.png").write_bytes(fruit(label, 500 + number))


def suggested(site: Desk) -> Suggestion:
    found = site.learned().suggestion
    assert found
    return found


def test_a_suggestion_is_named_undone_and_dismissed_for_good(tmp_path: Path) -> None:
    config = device(tmp_path, manifest(LEFT))
    truth = fill(config, 12)
    labelled(tmp_path / "images")
    with desk(config) as site:
        found = suggested(site)
        names = [each.name for each in found.files]
        assert len(names) >= 3 and np.mean([truth[name] == LOST for name in names]) > 0.7
        status, answer = site.act("suggestion", suggestion="0", class_name=LOST)
        assert status == 422 and "since it was shown" in answer["error"]
        status, done = site.act("suggestion", suggestion=found.id, class_name=LOST)
        assert status == 200 and {path.name for path in (site.images / LOST).iterdir()} == set(names)
        guesses = site.session.learner.guesses.rows.values()
        assert len(guesses) == len(names) and all(each.chosen and each.label == LOST for each in guesses)
        counts = {each["name"]: each["count"] for each in done["view"]["classes"]}
        assert counts[LOST] == len(names)
        status, view = site.act("undo", action=done["action"])
        assert status == 200 and not [*(site.images / LOST).iterdir()] and view["unlabelled"] == len(truth)
        again = suggested(site)
        assert {each.name for each in again.files} == set(names)
        status, view = site.act("dismiss", suggestion=again.id)
        assert status == 200 and (view["suggestion"] is None or view["suggestion"]["id"] != again.id)
    with desk(config) as site:
        after = site.learned().suggestion
        assert after is None or not set(names) & {each.name for each in after.files}


def test_without_unknown_pictures_nothing_is_suggested(tmp_path: Path) -> None:
    config = device(tmp_path, manifest(LEFT))
    for name in [name for name, label in fill(config, 12).items() if label == LOST]:
        (Path(config.folder) / "unlabelled" / name).unlink()
    labelled(tmp_path / "images")
    with desk(config) as site:
        assert site.learned().suggestion is None


@pytest.mark.parametrize("scenes", [9, 2])
def test_a_group_needs_three_scenes(scenes: int) -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 32))
    means = np.stack(
        [
            direction((each + 0.5 * rng.normal(size=(20, 32))).astype(np.float32)).mean(axis=0)
            for each in centres[:3]
        ]
    )
    known = KnownClasses(np.arange(3), means, np.empty(0, np.float32))
    z = (centres[3] + 0.4 * rng.normal(size=(9, 32))).astype(np.float32)
    alone = rng.normal(size=(5, 32)).astype(np.float32)
    found = resembling(
        np.concatenate([z, alone]), known, np.concatenate([np.arange(9) % scenes, 20 + np.arange(5)])
    )
    assert [set(rows) <= set(range(9)) and len(rows) > 5 for rows in found] == [True] * (scenes > 2)
