"""`kill -9` of the server, of a device or of the broker at every state of the protocol: the run ends as if nothing had happened.

Or it ends in a named state. It never hangs, and nothing counts twice.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.failures.points import DEVICE, POINTS, SERVER, Death
from tests.failures.scene import DEVICES, PROCESSES, ROUNDS, Ending, Scene, nothing

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(150)]

SEEDS = (1, 2, 3, 4, 5)
BROKER_AT = (
    "round announced",
    "broadcast on the broker",
    "report written down, not yet acknowledged",
    "round aggregated, no checkpoint",
    "broadcast fetched",
    "report sent, not acknowledged",
)
RELEASE = "release on the broker, not yet signed"
ONCE = {"closing step", RELEASE}  # they do not come once a round


def nth(point: str, seed: int) -> int:
    """In another round for another seed."""
    return 1 if point in ONCE else 1 + seed % ROUNDS


@pytest.fixture(scope="session", autouse=True)
def warm():
    """Whatever takes long to import is imported before anybody waits for it."""
    process = PROCESSES.Process(target=nothing)
    process.start()
    process.join(120)


@pytest.fixture(scope="session")
def undisturbed(mosquitto_program, tmp_path_factory):
    """The same run with nobody dying, once per seed."""

    @cache
    def run(seed: int, method: str = Scene.method, compression: str = "none") -> Ending:
        folder = tmp_path_factory.mktemp(f"undisturbed-{seed}")
        return Scene(mosquitto_program, folder, seed, method, compression).run()

    return run


def require_same(found: Ending, expected: Ending, who: str) -> None:
    assert found.deaths.get(who, 0) >= 1, f"nobody died: {found.deaths}"
    assert found.word in ("completed", "failed", "stopped")
    assert found.registered == found.word
    assert max(Counter(found.counted).values(), default=0) <= found.attempts
    if found.word == "completed":
        assert found.shared == expected.shared
        assert found.summary == expected.summary
        assert found.rounds == list(range(1, ROUNDS + 1))
    else:
        assert found.reason


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", SERVER)
def test_the_server_dies(mosquitto_program, tmp_path: Path, undisturbed, point, seed):
    method = "fedrep" if point == RELEASE else Scene.method  # one that exports an extractor
    scene = Scene(mosquitto_program, tmp_path, seed, method, server_death=Death(point, nth(point, seed)))
    found = scene.run()
    require_same(found, undisturbed(seed, method), "server")
    assert found.word == "completed", found.reason


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", DEVICE)
def test_a_device_dies(mosquitto_program, tmp_path: Path, undisturbed, point, seed):
    scene = Scene(mosquitto_program, tmp_path, seed, device_death=Death(point, nth(point, seed)))
    found = scene.run()
    require_same(found, undisturbed(seed), DEVICES[seed % 2])
    assert found.word == "completed", found.reason


@pytest.mark.parametrize(
    ("who", "point"),
    [
        (DEVICES[1], "personal parts kept, no report"),
        (DEVICES[1], "report in the outbox"),
        ("server", "round aggregated, no checkpoint"),
    ],
)
def test_what_error_feedback_kept_back_survives(mosquitto_program, tmp_path: Path, undisturbed, who, point):
    death = Death(point, 2)
    deaths = {"server_death": death} if who == "server" else {"device_death": death}
    found = Scene(mosquitto_program, tmp_path, 1, compression="topk", **deaths).run()
    expected = undisturbed(1, compression="topk")
    require_same(found, expected, who)
    assert found.word == "completed" and expected.shared != undisturbed(1).shared


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", BROKER_AT)
def test_the_broker_dies(mosquitto_program, tmp_path: Path, undisturbed, point, seed):
    assert point in POINTS
    scene = Scene(mosquitto_program, tmp_path, seed, broker_dies_at=(point, nth(point, seed)))
    found = scene.run()
    require_same(found, undisturbed(seed), "broker")
    assert found.word == "completed", found.reason
