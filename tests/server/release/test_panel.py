"""The panel of a release that changes how heads are fitted."""

from typing import Any

import pytest

from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry.tables import RolloutRecord
from edge_fl_server.release.rollout.stages import PANEL, rank, unproven_releases, with_panel


@pytest.mark.parametrize(
    ("fleet", "panel"), [(3, 3), (4, 3), (5, 3), (8, 4), (12, PANEL), (20, PANEL), (40, 10), (200, 50)]
)
def test_a_quarter_of_the_fleet_and_six_devices_where_possible(fleet: int, panel: int) -> None:
    devices = [f"pi-{number}" for number in range(fleet)]
    plan = with_panel(RolloutConfig(), devices, 7)
    assert sum(rank(device, 7) < plan.stages[0] for device in devices) == panel  # type: ignore[operator]
    assert len(plan.stages) == 2 and plan.stages[-1] == 1


@pytest.mark.parametrize("plan", [RolloutConfig((1.0,)), RolloutConfig((0.1, 0.5, 1.0))])
def test_stages_that_are_set_stay(plan: RolloutConfig) -> None:
    assert with_panel(plan, ["pi-1", "pi-2", "pi-3", "pi-4"], 7) is plan


def test_fewer_devices_than_a_stage_have_no_panel() -> None:
    assert with_panel(RolloutConfig(), ["pi-1", "pi-2"], 7).stages == "auto"


def record(number: int, release: int, state: Any, stage: int = 0, *stages: float) -> RolloutRecord:
    return RolloutRecord(number, "main", release, 1, {"stages": [*stages]}, state=state, stage=stage)


def test_withdrawn_is_what_was_taken_back_or_never_left_its_panel() -> None:
    found = [
        record(10, 7, "completed", 0, 1.0),  # again, after it was aborted
        record(9, 7, "aborted", 0, 0.3, 1.0),
        record(8, 6, "rolled_back", 1, 0.3, 1.0),
        record(7, 5, "paused", 0, 0.3, 1.0),
        record(6, 4, "replaced", 0, 0.3, 1.0),
        record(5, 3, "replaced", 1, 0.3, 1.0),
        record(4, 2, "replaced", 0, 1.0),
        record(3, 1, "completed", 1, 0.3, 1.0),
    ]
    assert unproven_releases(found) == {6, 5, 4}
