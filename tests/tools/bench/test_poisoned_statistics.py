"""The table of poisoned class statistics: what the attacks cost, and that the protections stop them."""

from pathlib import Path

import pytest

from tools.bench import poisoned_statistics
from tools.bench.poisoned_statistics import ATTACKS, Device, Measured

BOUND_OF_A_SUM, ONE_DEVICE, MASKED, PLAIN = ATTACKS[0], ATTACKS[1], ATTACKS[2], ATTACKS[4]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Device], Device]:
    return poisoned_statistics.split(*poisoned_statistics.features(tmp_path_factory.mktemp("data")), 1, 0)


@pytest.fixture(scope="module")
def honest(fleet: tuple[list[Device], Device]) -> Measured:
    return poisoned_statistics.measured(*fleet, None, True)[0]


def test_without_an_attack_the_protections_cost_nothing(
    fleet: tuple[list[Device], Device], honest: Measured
) -> None:
    assert honest.every >= poisoned_statistics.measured(*fleet, None, False)[0].every - 0.6


def test_what_no_devices_can_send_took_a_class_and_is_not_used(
    fleet: tuple[list[Device], Device], honest: Measured
) -> None:
    before, _ = poisoned_statistics.measured(*fleet, ONE_DEVICE, False)
    assert before.attacked < 5 < 50 < honest.attacked
    after, why = poisoned_statistics.measured(*fleet, ONE_DEVICE, True)
    assert why == "bounds: the device is rejected by name" and after.every > honest.every - 1
    after, why = poisoned_statistics.measured(*fleet, BOUND_OF_A_SUM, True)
    none = poisoned_statistics.accuracy(fleet[0], range(1, poisoned_statistics.DEVICES), fleet[1], None)
    assert why.startswith("bounds: no sum") and after == none


def test_lies_within_the_bounds_are_left_out_or_not_trusted(
    fleet: tuple[list[Device], Device], honest: Measured
) -> None:
    none = poisoned_statistics.accuracy(fleet[0], range(1, poisoned_statistics.DEVICES), fleet[1], None)
    for attack, by, lost in ((MASKED, "each device's choice", 4), (PLAIN, "comparison", 1)):
        before, _ = poisoned_statistics.measured(*fleet, attack, False)
        after, why = poisoned_statistics.measured(*fleet, attack, True)
        assert before.attacked < none.attacked <= after.attacked
        assert why.startswith(by) and after.every > honest.every - lost


def test_the_table_has_a_row_for_each_attack(
    fleet: tuple[list[Device], Device], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(poisoned_statistics, "ATTACKS", ATTACKS[3:4])
    poisoned_statistics.main(["--data", str(Path("unused")), "--seeds", "1", "--labels", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| 1 |") for line in lines) == 2
