"""Engine "auto": what is measured, how it is extrapolated, and what is chosen, recorded and ended."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from edge_fl.config import PrivacyConfig
from edge_fl.console.progress import Count
from edge_fl.errors import ConfigError
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines import choice, processes
from edge_fl_server.training.engines.choice import RoundTime
from edge_fl_server.training.engines.pool import PoolClients
from edge_fl_server.training.records import EngineTiming
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import ClientStore
from tools.bench import workloads

LONG = Plan(10**6)


def store(clients: int = 8, samples: int = 400, **options: object) -> ClientStore:
    """Tiny networks, on clients of different sizes."""
    return ClientStore.of(workloads.heads(clients=clients, samples=samples, **options))  # type: ignore[arg-type]


def choose(at: ClientStore, plan: Plan) -> EngineTiming:
    return choice.choose(at, build_method(at.settings.spec), plan)


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of tiny networks are short, however slow this machine is at the moment."""
    monkeypatch.setattr(choice, "SLOW_STEP_S", float("inf"))


@pytest.fixture
def no_pool() -> Iterator[None]:
    """Start and end without worker processes."""
    processes.end(processes.cores())
    yield
    processes.end(processes.cores())


def test_a_short_run_is_sequential_and_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SHORT_S", 1e6)
    found = choose(store(), Plan(1))
    assert found.engine == "sequential" and not found.seconds
    assert "too short to compare engines" in str(found)


def test_of_a_long_run_the_fastest_engine_is_built_and_the_choice_reported() -> None:
    at, lines = store(), list[str]()
    fleet = choice.build("auto", at, build_method(at.settings.spec), LONG, lines.append)
    found = fleet.engine_timing
    assert found and lines == [f"engine: {found}"]
    assert found.seconds.keys() | found.left_out.keys() == {"sequential", "pool", "vector"}
    assert found.seconds["vector"] > 0, "heads and small networks are always tried"
    assert fleet.engine == found.engine in found.seconds
    assert found.seconds[found.engine] <= choice.MIN_SPEEDUP * min(found.seconds.values())


def test_the_chosen_engine_computes_with_the_calibrated_threads() -> None:
    at = store()
    method = build_method(at.settings.spec)
    fleet = choice.build("auto", at, method, Plan(1), print)
    with processes.threads(2):
        updates = fleet.each("train", 1, method, dict.fromkeys(fleet.ids(), steps.start(method)))
        next(updates)
        assert torch.get_num_threads() == 1
        updates.close()  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 2


def test_an_engine_that_was_chosen_before_is_not_chosen_again() -> None:
    before = EngineTiming("vector", 4, 1, 0.5, seconds={"vector": 1.0})
    at = store()
    fleet = choice.build("auto", at, build_method(at.settings.spec), LONG, pytest.fail, before)
    assert fleet.engine == "vector" and fleet.engine_timing == before


@pytest.mark.usefixtures("no_pool")
def test_a_pool_that_cannot_pay_for_its_start_is_neither_started_nor_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "start_seconds", lambda workers: 1e9)
    found = choose(store(), LONG)
    assert found.engine != "pool" and "pool" not in found.seconds
    assert "including their start" in found.left_out["pool"]
    assert not processes.running(processes.cores())


@pytest.mark.usefixtures("no_pool")
def test_a_pool_is_chosen_by_its_measurement_not_by_its_lower_bound_and_else_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "start_seconds", lambda workers: -1e9)  # at best faster than anything
    round_times = choice.round_times

    def slow_pool(fleets: Mapping[str, Clients], *arguments: Any, **options: Any) -> dict[str, RoundTime]:
        times = round_times(fleets, *arguments, **options)
        return times | ({"pool": RoundTime(1e6, 1e6)} if "pool" in fleets else {})

    monkeypatch.setattr(choice, "round_times", slow_pool)
    found = choose(store(clients=100, samples=500), LONG)
    assert found.seconds["pool"] > found.seconds["vector"]
    assert found.engine != "pool"
    assert not processes.running(processes.cores())


def test_a_method_that_cannot_be_vectorised_is_measured_without() -> None:
    found = choose(store(method="fedala"), LONG)
    assert "depends on values" in found.left_out["vector"] and "vector" not in found.seconds


def test_steps_of_much_arithmetic_are_not_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SLOW_STEP_S", 0.0)
    assert "most of it arithmetic" in choose(store(), LONG).left_out["vector"]


def test_progress_names_the_engine_that_is_timed() -> None:
    counts: list[Count] = []
    at = store()
    choice.choose(at, build_method(at.settings.spec), LONG, pytest.fail, counts.append)
    stages = [count.stage for count in counts]
    assert list(dict.fromkeys(stages))[:2] == ["timing engine sequential", "timing engine vector"]
    for stage in set(stages):
        of_stage = [count for count in counts if count.stage == stage]
        assert of_stage[-1].over, stage
        assert [count.done for count in of_stage if not count.done], (
            "shown before the first client has trained"
        )
    assert any(0 < count.done < count.of for count in counts), "client by client"


def test_a_long_measurement_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TOLD_S", 0.0)
    at, lines = store(), list[str]()
    choice.build("auto", at, build_method(at.settings.spec), LONG, lines.append)
    assert lines[0].startswith("timing the engines on ") and lines[1].startswith("engine: ")


@pytest.mark.parametrize(("speedup", "engine"), [(1.0, "sequential"), (4.0, "pool")])
def test_what_would_take_too_much_of_the_run_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, speedup: float, engine: str
) -> None:
    """A run of a few long steps: two processes at best take a share of the time."""
    monkeypatch.setattr(choice, "SLOW_STEP_S", 0.0)
    monkeypatch.setattr(
        choice, "pace", lambda *arguments: choice.Pace(in_all_s=100.0, batch_s=10.0, step_s=10.0)
    )
    monkeypatch.setattr(choice, "_lower_bound", lambda *arguments: 1 / speedup)
    monkeypatch.setattr(choice, "round_times", lambda *arguments, **options: pytest.fail("measured"))
    found = choose(store(), Plan(1))
    assert found.engine == engine and not found.seconds
    assert "more than 5% of the run" in str(found)


def test_long_steps_are_measured_in_one_epoch_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SLOW_STEP_S", 0.0)
    monkeypatch.setattr(choice, "WARM_S", 0.0)
    epochs, rounds = list[int](), list[str]()
    round_ = choice._round

    def counted(clients: Clients, method: Method, *arguments: Any) -> RoundTime:
        epochs.append(method.epochs)
        rounds.append(type(clients).__name__)
        return round_(clients, method, *arguments)

    monkeypatch.setattr(choice, "_round", counted)
    at = store(epochs=10)
    choose(at, LONG)
    assert set(epochs) == {1}
    assert rounds[:2] == ["SequentialClients"] * 2 and len(rounds) <= 5


def test_a_run_is_expected_to_take_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SLOW_STEP_S", 0.0)
    one, ten = (choice.run_seconds(store(epochs=epochs), Plan(5), time.process_time) for epochs in (1, 10))
    assert 4 < ten / one < 25


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_cohort_has_as_many_clients_as_train_in_a_round_on_average(method: str) -> None:
    few = Plan(5, cohort=CohortConfig(participation=0.5, participation_from=0.1))
    at = store(clients=20, samples=2000, method=method)
    assert len(choice.cohort_sizes(few, at)) == 6, "a share of 0.3 on average"


def test_a_small_federation_is_its_own_sample() -> None:
    at = store()
    part = choice.sample(at, 1000)
    assert choice.batches(part) == choice.batches(at)
    for id in at:
        assert np.array_equal(part[id].data.train.x, at[id].data.train.x)
        assert np.array_equal(part[id].data.test.y, at[id].data.test.y)


def test_of_a_large_one_some_clients_of_about_mean_size_are_the_sample() -> None:
    at = store(clients=20, samples=2000)
    sizes = choice.batches(at)
    mean = sum(sizes.values()) / len(sizes)
    part = choice.batches(choice.sample(at, 4 * mean, 2))
    assert len(part) == 4
    assert all(part[id] == sizes[id] for id in part)
    assert abs(sum(part.values()) / len(part) - mean) <= 0.2 * mean


def test_large_clients_are_shortened_and_lose_their_privacy_settings() -> None:
    at = store(clients=4, samples=2000)
    private = msgspec.structs.replace(at.settings.spec, privacy=PrivacyConfig(noise_multiplier=1.0, clip=1.0))
    settings = msgspec.structs.replace(at.settings, spec=private)
    part = choice.sample(ClientStore(settings, at.x, at.y, at.split), 10, 4)
    assert all(2 <= size <= 4 for size in choice.batches(part).values())
    assert part.settings.spec.privacy == PrivacyConfig()
    assert 0 < len(part[next(iter(part))].data.test) < min(len(at[id].data.test) for id in at)


def test_a_worker_on_a_busy_core_does_not_decide_alone_about_the_pool() -> None:
    assert choice.balanced([1.0, 2.0], workers=2) == pytest.approx(4 / 3)
    assert choice.balanced([1.0, 1.0], workers=2) == pytest.approx(1.0)
    assert choice.balanced([0.5, 1.0, 1.5], workers=2) == 1.5, "workers took clients as they became free"
    assert choice.balanced([0.4, 0.8], workers=1) == 0.8


def test_the_busiest_worker_ends_a_round() -> None:
    assert choice.longest([3, 3, 3], 1) == 9
    assert choice.longest([3, 3, 3], 2) == 6
    assert choice.longest([10, 1, 1, 1], 2) == 10


def test_a_round_is_extrapolated_by_batches_and_evaluations() -> None:
    at = store(clients=20, samples=2000)
    half, sizes = Plan(5, cohort=CohortConfig(participation=0.5)), choice.batches(at).values()
    assert len(choice.cohort_sizes(half, at)) == 10
    assert sum(choice.cohort_sizes(half, at)) == pytest.approx(sum(sizes) / 2, rel=0.1)
    assert choice.expected(RoundTime(3.0, 9.0), at, at, Plan(5)) == pytest.approx(3.0)
    alone = choice.expected(RoundTime(3.0, 9.0), at, at, Plan(5), workers=len(at))
    assert alone == pytest.approx(3.0 * max(sizes) / sum(sizes)), "no shorter than the largest client"
    spec = msgspec.structs.replace(at.settings.spec, evaluate_every=2)
    often = ClientStore(msgspec.structs.replace(at.settings, spec=spec), at.x, at.y, at.split)
    assert choice.expected(RoundTime(3.0, 1.0), at, often, Plan(5)) == pytest.approx(3.0 + 1.0)


def test_an_engine_of_another_package_is_found_by_name_and_an_unknown_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{choice.ENTRY_POINTS}]\nmine = edge_fl_server.training.engines.pool:PoolClients\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert choice.find("mine") is PoolClients
    with pytest.raises(ConfigError, match=r"engine 'mime': unknown .did you mean 'mine'"):
        choice.require("mime")
