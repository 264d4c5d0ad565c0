"""The scale bench with a dozen devices: a round survives a restart of its broker, and idle agents stay connected."""

import re

import pytest

from edge_fl_broker.find import Program
from tools.bench.scale import runs
from tools.bench.scale.watch import COUNTED, Watch

pytestmark = pytest.mark.timeout(300)


def test_counters_that_restart_at_0_are_summed() -> None:
    watch = Watch(counted={COUNTED["sent"]: [(0.0, 100), (10.0, 200), (20.0, 50), (30.0, 80)]})
    assert watch.messages("sent") == (100 + 50 + 30, 10.0)
    assert watch.messages("dropped") == (0, 0.0)


@pytest.mark.nightly
@pytest.mark.broker
def test_a_round_survives_a_restart_of_its_broker(mosquitto_program: Program) -> None:
    lines = list(runs.busy(12, 4, 2, leave=0.1, deadline_s=40.0))
    assert re.match(r"12 devices, 4 of them full: run completed in", lines[0])
    assert re.match(r"round 2: [2-4] of [34] responded", lines[2])
    assert any(re.match(r"broker down for [1-9]", line) for line in lines)


@pytest.mark.slow
@pytest.mark.broker
def test_idle_devices_stay_connected(mosquitto_program: Program) -> None:
    assert any("150 idle devices" in line and "150 stayed" in line for line in runs.idle(150, 3.0))
