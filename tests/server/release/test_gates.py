"""Gates and stages of a roll-out: rare false aborts, early detection of harm, independence of the order of reports."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, reduce

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_fl import metrics
from edge_fl.errors import ConfigError
from edge_fl_server.recipes.recipe import GateConfig, RolloutConfig, parse
from edge_fl_server.release.rollout import gates
from edge_fl_server.release.rollout.gates import Outcome, outcome_of
from edge_fl_server.release.rollout.stages import (
    Stages,
    advanced,
    rank,
    resolved,
    steered,
    widened,
    with_outcome,
)

GATES = GateConfig()
PLAN = RolloutConfig(stages=(0.05, 0.25, 1.0))
FINE = Outcome("", 200, 4, 4, 1.0)
DEVICES = [f"pi-{number:03d}" for number in range(200)]


def outcome(rng: np.random.Generator, images: int, change: float = 0.0, discordant: float = 0.06) -> Outcome:
    """The outcome of a device whose true accuracy changes by `change`; `discordant` of its images get another prediction by chance."""
    lost, gained, _ = rng.multinomial(
        images, [p := discordant / 2 + max(-change, 0), q := discordant / 2 + max(change, 0), 1 - p - q]
    )
    return Outcome("", images, int(lost), int(gained), float(np.exp(rng.normal(0, 0.2))))


def roll_out(seed: int, harm: float = 0.0, share: float = 0.2) -> Stages:
    """A roll-out to 200 devices; a `share` of them loses `harm`."""
    rng = np.random.default_rng(seed)
    images = {device: int(rng.integers(100, 300)) for device in DEVICES}
    hurt = {device for device in DEVICES if rng.random() < share}
    at = Stages(7, PLAN)
    while at.state == "running":
        for device in [d for d in DEVICES if at.admits(d) and d not in at.outcomes]:
            change = rng.normal(0, 0.01) - (harm if device in hurt else 0.0)
            at = with_outcome(at, device, outcome(rng, images[device], change))
        at = advanced(at, DEVICES, 0.0)
    return at


def evidence_after(outcomes: Iterable[Outcome]) -> gates.Evidence:
    return reduce(lambda evidence, found: gates.updated(evidence, found, GATES), outcomes, gates.START)


def objection(outcomes: list[Outcome]) -> str:
    return gates.objection(evidence_after(outcomes), outcomes, GATES)


def test_false_aborts_of_500_roll_outs_stay_below_the_documented_rate() -> None:
    """2 % of 500 are 10; up to 16 are expected in 97.5 % of the cases at exactly that rate."""
    assert sum(roll_out(seed).state == "aborted" for seed in range(1000, 1500)) <= 16


def test_a_hundred_roll_outs_of_an_unchanged_extractor_abort_at_most_five_times() -> None:
    ended = [roll_out(seed).state for seed in range(100)]
    assert ended.count("aborted") <= 5
    assert set(ended) <= {"aborted", "completed"}


def test_ten_points_lost_on_a_fifth_of_the_devices_are_seen_within_the_first_two_stages() -> None:
    ended = [roll_out(seed, harm=0.1) for seed in range(40)]
    in_time = [at for at in ended if at.state == "aborted" and at.stage <= 1]
    assert len(in_time) >= 34
    assert all("points" in at.reason for at in in_time)


@pytest.mark.parametrize("spread", [0.0, 0.02])
@pytest.mark.parametrize("images", [10, 100, 1000])
def test_a_likelihood_ratio_while_nothing_is_wrong_is_a_supermartingale(images: int, spread: float) -> None:
    """Ville's inequality only requires a mean of at most 1 after every report."""
    rng = np.random.default_rng(images)
    drawn = [outcome(rng, images, rng.normal(0, spread)) for _ in range(4000)]
    drawn = [
        replace(each, fleet_images=each.images, fleet_lost=each.lost, fleet_gained=each.gained)
        for each in drawn
    ]
    drawn = [
        replace(each, promise_images=each.images, promise_lost=each.lost, promise_gained=each.gained)
        for each in drawn
    ]
    for name in ("mean", "decile", "latency", "fleet", "promise", gates.POOLED):
        grown = np.exp([gates.TESTS[name](found, GATES) for found in drawn]).mean(axis=1)
        assert grown.mean() - 3 * grown.std() / math.sqrt(len(grown)) <= 1.0


def test_the_likelihood_ratio_of_failures_has_a_mean_of_one_at_the_normal_rate() -> None:
    failed, fine = (math.exp(*gates.GATES["failures"](Outcome(why), GATES)) for why in ("enospc", ""))
    assert gates.NORMAL_FAILURE_RATE * failed + (1 - gates.NORMAL_FAILURE_RATE) * fine == pytest.approx(1.0)
    assert failed > 1 > fine


@pytest.mark.parametrize(
    ("outcomes", "gate"),
    [
        ([Outcome("canary_failed")] * 4, "failures"),
        ([Outcome("", 200, 22, 2), FINE, FINE, FINE, FINE] * 5, "decile"),
        ([Outcome("", 0, 0, 0, 4.0)] * 5, "latency"),
        ([Outcome("", 400, 16, 0)] * 12, "mean"),
        ([replace(FINE, fleet_images=200, fleet_lost=20)] * 4, "fleet"),
        ([replace(FINE, promise_images=200, promise_lost=20)] * 4, "promise"),
    ],
)
def test_each_gate_detects_its_harm(outcomes: list[Outcome], gate: str) -> None:
    found = evidence_after(outcomes)
    assert max(gates.GATES, key=partial(gates.ratio, found)) == gate
    assert objection(outcomes)
    assert not objection([FINE] * 200)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        (
            [*[Outcome("canary_failed")] * 4, Outcome("enospc"), FINE],
            "failures: 5 of 6 devices failed (canary_failed, enospc)",
        ),
        (
            [Outcome("", 200, 22, 2), FINE, FINE, FINE, FINE] * 5,
            "decile: accuracy changed by -2.0 points, in the bottom decile of 25 devices by -10.0",
        ),
        (
            [Outcome("", 0, 0, 0, slower) for slower in (3.0, 6.0, 4.5, 5.0, 4.0)],
            "latency: a sample takes 4.50 times as long",
        ),
        (
            [Outcome("", 400, 16, 0), Outcome("", 400, 12, 0), Outcome("", 400, 20, 0)] * 4,
            "mean: accuracy changed by -4.0 points, in the bottom decile of 12 devices by -5.0",
        ),
        (
            [*[replace(FINE, fleet_images=20, fleet_lost=12, fleet_gained=2)] * 4, FINE],
            "fleet: with the fleet's head alone accuracy changed by -50.0 points, in the bottom decile of 4 devices by -50.0",
        ),
        (
            [*[replace(FINE, promise_images=20, promise_lost=12, promise_gained=2)] * 4, FINE],
            "promise: of 80 samples of 4 devices 48 fell out of their prediction sets, and 8 came into them",
        ),
    ],
)
def test_the_reason_of_an_abort_names_the_gate_and_what_it_saw(outcomes: list[Outcome], reason: str) -> None:
    assert objection(outcomes) == reason


def test_the_ratio_starts_at_one_and_each_report_multiplies_it() -> None:
    fine, failed = Outcome("", 200, 4, 4, 1.0), Outcome("enospc")
    once = gates.updated(gates.START, fine, GATES)
    assert all(gates.ratio(gates.START, name) == 0 for name in gates.TESTS)
    assert once == {name: pytest.approx(test(fine, GATES)) for name, test in gates.TESTS.items()}
    twice = gates.updated(once, failed, GATES)
    assert twice["failures"] == pytest.approx((once["failures"][0] + math.log(7),))


def test_no_single_device_can_end_a_roll_out() -> None:
    for harmed in (Outcome("enospc"), Outcome("", 50, 10, 0), Outcome("", 0, 0, 0, 100.0)):
        assert not objection([harmed, *[Outcome("", 100, 2, 2, 1.0)] * 50])


def test_two_devices_outside_the_stage_do_not_abort_a_roll_out_of_500() -> None:
    fleet = [f"pi-{number:03d}" for number in range(500)]
    for release in range(1, 30):
        at = Stages(release, PLAN)
        outsiders = [device for device in fleet if not at.admits(device)][:2]
        for device in outsiders:
            at = with_outcome(at, device, Outcome("", 10**6, 10**6, 0, 100.0))
        assert (at.state, at.outcomes) == ("running", {})


def test_reports_of_two_devices_of_a_stage_do_not_abort_a_roll_out() -> None:
    lie, strict = Outcome("", 10**6, 10**6, 0, 100.0, 10**6, 10**6), GateConfig(false_abort=0.5)
    assert not objection([lie] * 2)
    assert objection([lie] * 3)
    evidence = gates.updated(gates.updated(gates.START, lie, strict), lie, strict)
    assert not gates.objection(evidence, [lie] * 2, strict)


def reports_until_abort(outcomes: Iterable[Outcome]) -> int:
    evidence = gates.START
    for count, found in enumerate(outcomes, 1):
        evidence = gates.updated(evidence, found, GATES)
        if gates.objection(evidence, [found], GATES):
            return count
    raise AssertionError("no abort")


LIE = Outcome("", 10**6, 0, 10**6, 1e-6, 10**6, 0, 10**6)


def of_the_fleets_head(found: Outcome) -> Outcome:
    """Labels correct what the fleet's head loses: the served head is the same."""
    return Outcome("", found.images, 0, 0, 0.0, found.images, found.lost, found.gained)


HARMS: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "failures": lambda rng: Outcome("canary_failed"),
    "accuracy": lambda rng: outcome(rng, 200, -0.1),
    "fleet's head": lambda rng: of_the_fleets_head(outcome(rng, 200, -0.1)),
    "latency": lambda rng: Outcome("", 0, 0, 0, float(np.exp(rng.normal(math.log(4), 0.2)))),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_false_report_delays_a_justified_abort_by_two_devices_and_rarely_by_three(harm: str) -> None:
    delays = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        bad = [HARMS[harm](rng) for _ in range(30)]
        expected = reports_until_abort(bad)
        delays += [
            reports_until_abort([*bad[:place], LIE, *bad[place:]]) - expected for place in range(expected)
        ]
    assert max(delays) <= 3
    assert np.mean(np.array(delays) > 2) < 0.02


@pytest.mark.parametrize("seed", range(20))
def test_a_release_that_loses_29_to_67_points_does_not_pass_the_first_stage_of_16_devices(seed: int) -> None:
    """Devices have 7 to 55 test images."""
    rng, fleet = np.random.default_rng(seed), DEVICES[:16]
    at = Stages(7, widened(PLAN, fleet, 7))
    for device in filter(at.admits, fleet):
        at = with_outcome(at, device, outcome(rng, int(rng.integers(7, 56)), -rng.uniform(0.29, 0.67), 0.02))
    at = advanced(at, fleet, 0.0)
    assert (at.state in ("aborted", "paused"), at.stage) == (True, 0), at


def test_sixty_images_lost_and_one_gained_abort_at_three_devices() -> None:
    assert objection([Outcome("", 40, 25, 0), Outcome("", 20, 10, 1), Outcome("", 55, 25, 0)])


def test_a_loss_of_half_the_accuracy_is_stopped_in_a_stage_of_six_devices_with_ten_images() -> None:
    stopped = []
    for seed in range(300):
        rng, fleet = np.random.default_rng(seed), DEVICES[:6]
        at = Stages(7, RolloutConfig(stages=(0.999, 1.0)))
        for device in fleet:
            at = with_outcome(at, device, outcome(rng, 10, -0.5))
        stopped.append(advanced(at, fleet, 0.0).state != "completed")
    assert np.mean(stopped) >= 0.99


@pytest.mark.parametrize("images", [5, 10, 20, 50, 1000])
def test_a_release_that_classifies_nothing_correctly_is_aborted_at_three_devices(images: int) -> None:
    assert reports_until_abort([Outcome("", images, images, 0)] * 5) == 3


def of_stage(found: Iterable[Outcome]) -> Stages:
    """The first stage of a roll-out after these outcomes, of all its devices."""
    at, fleet = Stages(7, RolloutConfig(stages=(0.999, 1.0))), DEVICES
    for device, each in zip(fleet, found, strict=False):
        at = with_outcome(at, device, each)
    return advanced(at, list(at.outcomes), 0.0)


def test_no_stage_completes_while_its_reports_together_say_worse() -> None:
    """Each report says too little for a gate: a few of five images."""
    at = of_stage([Outcome("", 5, lost, gained) for lost, gained in ((2, 0), (3, 0), (1, 0), (2, 0), (1, 0))])
    assert (at.state, at.stage) == ("paused", 0)
    assert at.reason == "stage 1: of 9 changed predictions on 5 devices 9 became wrong and 0 right"
    assert steered(at, "aborted").state == "aborted"
    fine = [Outcome("", 5, lost, gained) for lost, gained in ((2, 0), (1, 2), (1, 0), (0, 1), (1, 1))]
    assert of_stage(fine).state == "completed"


@pytest.mark.parametrize("images", [5, 50, 10**6])
def test_one_false_report_neither_pauses_a_stage_nor_lets_a_harmful_release_pass(images: int) -> None:
    lie, silent = Outcome("", images, images, 0), [Outcome("", 0, 0, 0)] * 5
    assert of_stage([lie, *silent]).state == "completed"
    assert of_stage([lie, lie, *silent]).state == "paused"
    masked = [Outcome("", images, 0, images), *[Outcome("", 5, 2, 0)] * 6]
    assert of_stage(masked).state == "paused"
    assert of_stage([Outcome("", images, 0, images), *[Outcome("", 10, 5, 0)] * 6]).state == "aborted"


def test_a_device_that_left_after_its_report_counts_in_its_stage() -> None:
    """Two of three succeeded and left; the third failed and stays: alone it would be a stage in which nothing succeeded."""
    plan, fleet = RolloutConfig(stages=(0.999, 1.0), success=0.6, stage_wait_s=60), DEVICES[:3]
    at = Stages(7, plan)
    for device, failed in zip(fleet, ("", "", "enospc"), strict=True):
        at = with_outcome(at, device, Outcome(failed))
    assert advanced(at, fleet[2:], 0.0).state == "completed"
    assert advanced(at, [], 0.0).state == "completed"
    strict = msgspec.structs.replace(plan, success=0.9)
    paused = advanced(replace(at, plan=strict), fleet[:2], 0.0)  # the one that failed has left
    assert (paused.state, paused.reason) == ("paused", "stage 1: 2 of 3 devices succeeded, 0 did not report")


def test_the_report_of_a_device_that_is_blocked_by_now_does_not_count_in_its_stage() -> None:
    at, fleet = Stages(7, RolloutConfig(stages=(0.999, 1.0))), DEVICES[:3]
    for device, failed in zip(fleet, ("", "", "enospc"), strict=True):
        at = with_outcome(at, device, Outcome(failed))
    assert advanced(at, fleet[:2], 0.0).state == "paused"
    assert advanced(at, fleet[:2], 0.0, blocked=fleet[2:]).state == "completed"


@pytest.mark.parametrize("release", range(1, 21))
def test_every_stage_has_at_least_three_devices_of_a_small_fleet(release: int) -> None:
    plan = widened(PLAN, DEVICES[:20], release)
    assert sum(Stages(release, plan).admits(device) for device in DEVICES[:20]) >= 3
    assert plan.stages[-1] == 1 and list(plan.stages) == sorted(set(plan.stages))
    assert widened(PLAN, DEVICES[:2], release) == PLAN
    assert widened(RolloutConfig(stages=(1.0,)), DEVICES[:20], release).stages == (1.0,)


COUNTS = st.integers(0, 50)
OUTCOMES = st.builds(
    lambda failed, lost, gained, same, slower: Outcome(
        failed, lost + gained + same, lost, gained, slower, lost + gained + same, gained, lost
    ),
    st.sampled_from(["", "", "canary_failed"]), COUNTS, COUNTS, COUNTS, st.floats(0, 100),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(OUTCOMES, max_size=30), st.randoms(use_true_random=False))
def test_evidence_is_finite_and_does_not_depend_on_the_order(outcomes, random) -> None:
    ends, others = evidence_after(outcomes), evidence_after(random.sample(outcomes, len(outcomes)))
    for name, ratios in ends.items():
        assert all(map(math.isfinite, ratios))
        assert ratios == pytest.approx(others[name])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DEVICES[:20]), OUTCOMES), max_size=40), st.integers(0, 2))
def test_a_roll_out_only_moves_forward_and_final_states_do_not_change(answers, stage) -> None:
    at = Stages(3, PLAN, stage)
    for device, found in answers:
        after = advanced(with_outcome(at, device, found), DEVICES[:20], 0.0)
        assert after.stage >= at.stage
        assert not at.over or after == at
        assert all(after.admits(known) for known in DEVICES if at.admits(known)) or after.over
        at = after


def test_ranks_are_uniform_and_differ_between_releases() -> None:
    names = [f"d{number}" for number in range(5000)]
    first = {name for name in names if rank(name, 1) < 0.05}
    second = {name for name in names if rank(name, 2) < 0.05}
    assert 200 < len(first) < 300
    assert len(first & second) < 40


def test_a_stage_is_the_share_of_the_fleet_with_the_lowest_ranks() -> None:
    ordered = sorted(DEVICES, key=lambda device: rank(device, 7))
    plan = RolloutConfig(stages=(rank(ordered[50], 7), 1.0))
    for state, admitted, returned in (("running", 50, 0), ("completed", 200, 0), ("aborted", 0, 50)):
        at = Stages(7, plan, state=state)
        assert [d for d in ordered if at.admits(d)] == ordered[:admitted]
        assert [d for d in ordered if at.returns(d)] == ordered[:returned]


def test_a_stage_with_too_few_successes_pauses_and_can_be_resumed_or_aborted() -> None:
    plan = RolloutConfig(stages=(0.5, 1.0), success=0.9, stage_wait_s=60)
    at = Stages(1, plan)
    members = [device for device in DEVICES[:20] if at.admits(device)]
    for device in members[:-2]:
        at = with_outcome(at, device, Outcome("", 100, 1, 1, 1.0))
    assert advanced(at, DEVICES[:20], 59.0) == at
    paused = advanced(at, DEVICES[:20], 61.0)
    assert (paused.state, paused.stage) == ("paused", 0)
    assert "2 did not report" in paused.reason
    assert advanced(paused, DEVICES[:20], 1e9) == paused
    assert steered(paused, "running").state == "running"
    assert steered(paused, "aborted").state == "aborted"
    assert steered(steered(paused, "aborted"), "running").state == "aborted"


def test_absent_devices_do_not_delay_a_stage_and_an_empty_stage_is_passed() -> None:
    at = advanced(Stages(1, PLAN), [], 0.0)
    assert (at.state, at.stage) == ("completed", 2)


@pytest.mark.parametrize(
    ("errors", "state"),
    [
        (["canary_failed"] * 9 + [""], "completed"),
        (["canary_failed"] * 9 + ["no_data"], "paused"),
        (["no_data"] * 10, "completed"),
        (["no_labels"] * 10, "completed"),
    ],
)
def test_a_single_stage_has_no_gates_and_pauses_if_the_release_succeeded_nowhere(
    errors: list[str], state: str
) -> None:
    at = Stages(1, RolloutConfig())
    assert all(at.admits(device) for device in DEVICES)
    for device, error in zip(DEVICES, errors, strict=False):
        at = with_outcome(at, device, Outcome(error))
    at = advanced(at, DEVICES[:10], 0.0)
    assert at.state == state
    assert all(at.admits(device) for device in DEVICES)


@pytest.mark.parametrize(
    ("devices", "previous", "stages"),
    [(12, 6, (0.05, 0.25, 1.0)), (11, 6, (1.0,)), (1000, 0, (1.0,))],
)
def test_auto_stages_are_careful_in_a_large_fleet_with_a_previous_release(
    devices: int, previous: int, stages: tuple[float, ...]
) -> None:
    assert resolved(RolloutConfig(success=0.5), devices, previous) == RolloutConfig(stages, success=0.5)
    assert resolved(PLAN, devices, previous) == PLAN


def test_an_outcome_is_read_from_a_report() -> None:
    found = {metrics.TEST_SAMPLES: 40.0, metrics.TEST_LOST: 3.0, metrics.TEST_GAINED: 1.0}
    found |= {metrics.LATENCY_BEFORE: 2.0, metrics.LATENCY_AFTER: 5.0}
    assert outcome_of("", found) == Outcome("", 40, 3, 1, 2.5)
    alone = {metrics.FLEET_LOST: 30.0, metrics.FLEET_GAINED: 20.0}
    assert outcome_of("", found | alone) == Outcome("", 40, 3, 1, 2.5, 50, 30, 20)
    sets = {metrics.PROMISE_LOST: 30.0, metrics.PROMISE_GAINED: 20.0}
    assert outcome_of("", found | sets) == Outcome(
        "", 40, 3, 1, 2.5, promise_images=50, promise_lost=30, promise_gained=20
    )
    assert outcome_of("canary_failed", found) == Outcome("canary_failed")
    assert outcome_of("", {}) == Outcome()


@pytest.mark.parametrize(
    ("before", "after", "slower"),
    [(0.02, 0.9, 1.0), (0.9, 0.02, 1.0), (0.1, 4.0, 4.0), (4.0, 0.1, 0.25), (2.0, 5.0, 2.5), (0.0, 5.0, 0.0)],
)
def test_latencies_below_a_millisecond_count_as_one(before: float, after: float, slower: float) -> None:
    found = outcome_of("", {metrics.LATENCY_BEFORE: before, metrics.LATENCY_AFTER: after})
    assert found.slower == slower


@pytest.mark.parametrize(
    "lies",
    [
        {"test_samples": 1e300},
        {"test_samples": 1.0, "test_samples.lost": 1e18},
        {"test_samples": 1.0, "fleet.test_samples.lost": 1e18},
        {"latency_ms.after": -1.0},
    ],
)
def test_false_reports_of_one_device_add_bounded_evidence(lies) -> None:
    liar = outcome_of("", lies)
    assert not objection([liar, *[Outcome("", 100, 2, 2, 1.0)] * 20])


@pytest.mark.parametrize("stages", ["[]", "[0.5]", "[0.5, 0.5, 1.0]", "[0.5, 0.2, 1.0]", "[0.0, 1.0]"])
def test_stages_grow_and_end_with_the_whole_fleet(stages: str) -> None:
    with pytest.raises(ConfigError):
        parse(f"[release.rollout]\nstages = {stages}")
    with pytest.raises(ConfigError, match=r"\[release.rollout\] stages = 'careful': unknown name.*auto"):
        parse("[release.rollout]\nstages = 'careful'")
    assert parse("[release.rollout]\nstages = [0.05, 1]").release.rollout.stages == (0.05, 1.0)


def test_the_plan_survives_the_registry() -> None:
    assert msgspec.convert(msgspec.to_builtins(PLAN), RolloutConfig) == PLAN
