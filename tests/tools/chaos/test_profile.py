"""A chaos profile is read strictly, and what it draws is the same again from the same seed."""

import math
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConfigError
from tools.chaos.faulty_transport import NO_FAULTS
from tools.chaos.injector import FaultInjector
from tools.chaos.profile import PROFILES, Chaos, Devices, Restarts, load
from tools.chaos.timeline import skew_s, timeline

IDS = [f"sim-{number:03d}" for number in range(400)]


@pytest.mark.parametrize("name", sorted(file.stem for file in PROFILES.glob("*.toml")))
def test_a_profile_that_comes_along_is_read_by_its_name(name: str) -> None:
    chaos = load(name)
    assert chaos.link != NO_FAULTS or chaos.devices != Devices() or chaos.broker != Restarts()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[link]\ndropp = 0.1", r"\[link\] unknown key 'dropp' \(did you mean 'drop'\?\)"),
        ("[link]\ndrop = 1.5", r"\[link\] drop = 1.5: expected `float` <= 1.0"),
        ("[link]\ndelay_s = nan", "expected a finite number|expected `float`"),
        ("after_s = 5\nuntil_s = 1", "after_s 5 is later than until_s 1"),
        ("[devices]\naway_s = [3, 1]", "away_s from 3 to 1"),
        ("seed = -1", "seed"),
        ("[brokers]", "did you mean 'broker'"),
        ("x", "not TOML"),
    ],
)
def test_a_mistake_in_a_profile_is_rejected_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "chaos.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(str(file))


def test_a_name_that_is_none_is_rejected_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "fleet", "up", "--faults", "tools.chaos:lossi"]) == 4
    assert "did you mean 'lossy'" in capsys.readouterr().err


def test_the_timeline_follows_from_the_seed() -> None:
    chaos = Chaos(3, 1.0, 20.0, devices=Devices(crash=0.3, leave=0.1, cut=0.2), broker=Restarts(2))
    first = timeline(chaos, IDS)
    assert first == timeline(chaos, IDS) and first != timeline(
        Chaos(4, 1.0, 20.0, devices=chaos.devices), IDS
    )
    assert [outage.at_s for outage in first] == sorted(outage.at_s for outage in first)
    assert all(1.0 <= outage.at_s <= 20.0 for outage in first)
    by_kind = {what: [m for m in first if m.kind == what] for what in ("crash", "cut", "broker", "server")}
    assert 90 < len([m for m in by_kind["crash"] if math.isfinite(m.duration_s)]) < 150
    assert 20 < len([m for m in by_kind["crash"] if math.isinf(m.duration_s)]) < 65
    assert 50 < len(by_kind["cut"]) < 110
    assert len(by_kind["broker"]) == 2 and not by_kind["server"]
    assert all(0.5 <= m.duration_s <= 3.0 for m in by_kind["cut"])


def test_a_devices_fate_does_not_depend_on_the_others() -> None:
    chaos = Chaos(3, devices=Devices(crash=0.5, cut=0.5))
    alone = timeline(chaos, IDS[7:8])
    assert alone == [outage for outage in timeline(chaos, IDS) if outage.target == IDS[7]]


def test_clocks_are_off_to_both_sides_and_no_further_than_allowed() -> None:
    chaos = Chaos(3, devices=Devices(clock_skew_s=100.0))
    skews = [skew_s(chaos, device) for device in IDS]
    assert min(skews) < -50 and max(skews) > 50 and all(abs(skew) <= 100 for skew in skews)


def test_a_fleet_cannot_restart_a_server_without_being_told_how() -> None:
    with pytest.raises(ConfigError, match="nothing was changed"):
        FaultInjector(Chaos(server=Restarts(1)), IDS, lambda *_: None)  # type: ignore[arg-type, return-value]
