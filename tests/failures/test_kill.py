"""SIGKILL of the server, a device or the broker at every point of the protocol: the result equals that of the undisturbed run.

The run never hangs, ends in one named state, and counts no report twice.
"""

import random
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.failures.points import DEVICE, POINTS, SERVER, Death
from tests.failures.scene import DEVICES, PROCESSES, ROUNDS, Ending, Fault, Scene, nothing

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1000)]

SEEDS = (1, 2, 3, 4, 5)
BROKER_AT = (
    "round announced",
    "broadcast on the broker",
    "report stored, not yet acknowledged",
    "round aggregated, no checkpoint",
    "broadcast fetched",
    "report sent, not acknowledged",
)
RELEASE = "release on the broker, not yet signed"
ONCE = {"final personalisation", RELEASE}  # not once per round


def kills(points: Iterable[str]) -> list[Any]:
    """Each point with seed 1 or 2 in CI, and with all seeds nightly."""
    return [
        pytest.param(point, seed, marks=() if seed == 1 + number % 2 else pytest.mark.nightly)
        for number, point in enumerate(points)
        for seed in SEEDS
    ]


def nth(point: str, seed: int) -> int:
    """Another round for another seed."""
    return 1 if point in ONCE else 1 + seed % ROUNDS


@pytest.fixture(scope="session", autouse=True)
def warm():
    """Import torch in the fork server before a deadline runs."""
    process = PROCESSES.Process(target=nothing)
    process.start()
    process.join(120)


@pytest.fixture(scope="session")
def undisturbed(mosquitto_program, tmp_path_factory):
    """The same run without a kill, once per seed."""

    @cache
    def run(seed: int, method: str = Scene.method, compression: str = "none") -> Ending:
        folder = tmp_path_factory.mktemp(f"undisturbed-{seed}")
        return Scene(mosquitto_program, folder, seed, method, compression).run()

    return run


def require_same(found: Ending, expected: Ending, who: str) -> None:
    assert found.deaths.get(who, 0) >= 1, f"nothing was killed: {found.deaths}"
    assert found.state in ("completed", "failed", "stopped")
    assert found.registered == found.state
    assert max(Counter(found.counted).values(), default=0) <= found.attempts
    if found.state == "completed":
        assert found.shared == expected.shared
        assert found.summary == expected.summary
        assert found.rounds == list(range(1, ROUNDS + 1))
    else:
        assert found.reason


@pytest.mark.parametrize(("point", "seed"), kills(SERVER))
def test_a_killed_server_does_not_change_the_result(
    mosquitto_program, tmp_path: Path, undisturbed, point, seed
):
    method = "fedrep" if point == RELEASE else Scene.method  # one that exports an extractor
    scene = Scene(mosquitto_program, tmp_path, seed, method, server_death=Death(point, nth(point, seed)))
    found = scene.run()
    require_same(found, undisturbed(seed, method), "server")
    assert found.state == "completed", found.reason


@pytest.mark.parametrize(("point", "seed"), kills(DEVICE))
def test_a_killed_device_does_not_change_the_result(
    mosquitto_program, tmp_path: Path, undisturbed, point, seed
):
    scene = Scene(mosquitto_program, tmp_path, seed, device_death=Death(point, nth(point, seed)))
    found = scene.run()
    require_same(found, undisturbed(seed), DEVICES[seed % 2])
    assert found.state == "completed", found.reason


@pytest.mark.parametrize(
    ("who", "point"),
    [
        (DEVICES[1], "personal parts kept, no report"),
        (DEVICES[1], "report in the outbox"),
        ("server", "round aggregated, no checkpoint"),
    ],
)
def test_the_residual_of_error_feedback_survives_a_kill(
    mosquitto_program, tmp_path: Path, undisturbed, who, point
):
    death = Death(point, 2)
    deaths = {"server_death": death} if who == "server" else {"device_death": death}
    found = Scene(mosquitto_program, tmp_path, 1, compression="topk", **deaths).run()
    expected = undisturbed(1, compression="topk")
    require_same(found, expected, who)
    assert found.state == "completed" and expected.shared != undisturbed(1).shared


@pytest.mark.parametrize(("point", "seed"), kills(BROKER_AT))
def test_a_killed_broker_does_not_change_the_result(
    mosquitto_program, tmp_path: Path, undisturbed, point, seed
):
    assert point in POINTS
    scene = Scene(mosquitto_program, tmp_path, seed, broker_dies_at=(point, nth(point, seed)))
    found = scene.run()
    require_same(found, undisturbed(seed), "broker")
    assert found.state == "completed", found.reason


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, *range(3, 11)))]
)
def test_random_faults_over_mutual_tls_do_not_change_the_result(mosquitto_program, tmp_path: Path, seed):
    """Three faults each: SIGKILL or a stall of the server, a device or the broker, at random times of a run of ten rounds."""
    rng = random.Random(seed)
    faults = tuple(
        Fault(
            rng.choice(["server", "broker", *DEVICES]),
            rng.uniform(0.5, 2.5),
            rng.choice([0.0, 0.0, rng.uniform(0.5, 3.0)]),
        )
        for _ in range(3)
    )
    arguments = {"method": "fedavg", "rounds": 10, "secure": True}
    expected = Scene(mosquitto_program, tmp_path / "undisturbed", seed, **arguments).run()
    found = Scene(mosquitto_program, tmp_path / "disturbed", seed, faults=faults, **arguments).run()
    assert sum(found.deaths.values()) >= 1, "no fault came in time"
    assert (found.state, found.registered) == ("completed", "completed"), found.reason
    assert found.shared == expected.shared
    assert found.summary == expected.summary
    assert found.rounds == list(range(1, 11))
    assert max(Counter(found.counted).values()) <= found.attempts
