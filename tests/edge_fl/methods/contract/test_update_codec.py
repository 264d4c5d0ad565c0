"""Update codec with every method: compressed updates decode correctly, private ones stay within their budget."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.errors import BudgetExhaustedError, MethodError, PrivacyError
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.codec import differential_privacy
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import EPSILON
from edge_fl_server.mqtt.updates import validation
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.engines.vector import VectorClients
from edge_fl_server.training.rounds import Plan, RoundResult
from tests.edge_fl.methods import toy
from tests.edge_fl.methods.test_contract import fingerprint, structure, through_bytes

KINDS = ("fp16", "int8", "topk")
METHODS = (
    "fedavg",
    "fedrep",
    "fedbn",
    "fedpac",
    "fedproto",
    "fedkd",
    "fedamp",
    "repper",
    "fedavg+ft",
    "scaffold",
)
every_kind = pytest.mark.parametrize("kind", KINDS)
PRIVACY = PrivacyConfig(noise_multiplier=4.0, clip=0.5)


def compressed(name: str, kind: str, **options: Any) -> Method:
    return replace(toy.method(name, **options), compression=CompressionConfig(kind))  # type: ignore[arg-type]


def private_method(name: str, privacy: PrivacyConfig = PRIVACY, kind: str = "none") -> Method:
    found = replace(toy.method(name, toy.net(norm=False)), privacy=privacy)
    return replace(found, compression=CompressionConfig(kind))  # type: ignore[arg-type]


def ran(method: Method, fleet: Any = SequentialClients, number: int = 2) -> tuple[list[RoundResult], Any]:
    made = fleet(toy.clients(), method)
    return list(rounds.run(method, made, Plan(number, seed=3))), made


def one_update(method: Method, seed: int = 0) -> tuple[Parts, Parts, Parts]:
    """(broadcast, what a client's step gave, that as it travels)."""
    down = steps.broadcast(method, steps.start(method), "c0")
    up, own = steps.local_update(method, down, steps.start_own(method, "c0"), toy.batches())
    up = method.pack(up)
    return down, up, update_codec.sent(method, down, up, own, seed)[0]


@every_kind
@pytest.mark.parametrize("name", METHODS)
def test_an_update_is_taken_by_the_server_and_opens_to_nearly_what_it_was(name: str, kind: str) -> None:
    method = compressed(name, kind)
    down, up, travels = one_update(method)
    # names, shapes, dtypes
    taken = validation.parts_of(tree_bytes(travels), validation.expected_of(method, whole=True))
    assert fingerprint(taken) == fingerprint(travels)
    opened = update_codec.received(method, down, taken)
    assert structure(opened) == structure(up)
    received = {(part, name) for part, params in down.items() if part in method.net.parts for name in params}
    for (part, key), tensor in tree.leaves(up).items():
        change = opened[part][key] - tensor if tensor.is_floating_point() else tensor - opened[part][key]
        if (part, key) not in received or key.startswith(tree.BUFFER):
            assert not change.any(), "travels as it is"
        else:
            allowed = (tensor - down[part][key]).abs().max() * {"fp16": 1e-3, "int8": 1 / 127, "topk": 1}[
                kind
            ]
            assert change.abs().max() <= allowed * 1.01 + 1e-6


@every_kind
def test_a_late_update_is_opened_on_what_it_began_from(kind: str) -> None:
    method = compressed("fedavg", kind)
    down, _, travels = one_update(method)
    newer = tree.map(lambda t: t + 1, down)
    late = Update("c0", 37, travels, start=down, staleness=1)
    (opened,) = steps.received(method, [late], {"c0": newer})
    assert fingerprint(opened.parts) == fingerprint(update_codec.received(method, down, travels))
    (on_time,) = steps.received(method, [replace(late, start=None)], {"c0": newer})
    assert fingerprint(on_time.parts) == fingerprint(update_codec.received(method, newer, travels))


@every_kind
@pytest.mark.parametrize(("name", "saves"), [("fedavg", True), ("fedrep", True), ("fedproto", False)])
def test_the_round_loop_counts_encoded_bytes_and_uses_decoded_updates(
    name: str, saves: bool, kind: str
) -> None:
    plain, _ = ran(toy.method(name))
    small, _ = ran(compressed(name, kind))
    assert (small[-1].bytes_up < 0.66 * plain[-1].bytes_up) == saves
    assert small[-1].bytes_down == plain[-1].bytes_down
    assert structure(small[-1].shared) == structure(plain[-1].shared)
    assert (fingerprint(small[-1].shared) == fingerprint(plain[-1].shared)) != saves


def test_nothing_changes_without_compression() -> None:
    method = toy.method("fedrep")
    down, up, travels = one_update(method)
    assert travels is up and update_codec.received(method, down, up) is up
    assert (
        steps.start_own(method, "c0").keys()
        == {"head", "extractor.norm"} & steps.start_own(method, "c0").keys()
    )


def test_error_feedback_sends_everything_in_the_end() -> None:
    method = compressed("fedavg", "topk")
    own, sent, learned = steps.start_own(method, "c0"), Parts(), Parts()
    down = steps.broadcast(method, steps.start(method), "c0")
    for number in range(1, 6):
        up, _ = steps.local_update(method, down, {}, toy.batches(round=number))
        travels, own = update_codec.sent(method, down, up, own, number)
        change = tree.map(torch.sub, update_codec.received(method, down, travels), down)
        sent = tree.map(torch.add, sent, change) if sent else change
        change = tree.map(torch.sub, up, down)
        learned = tree.map(torch.add, learned, change) if learned else change
    for part in ("extractor", "head"):
        for name, residual in own[part + update_codec.RESIDUAL].items():
            assert torch.allclose(sent[part][name] + residual, learned[part][name], atol=1e-5)
            assert residual.any()


@pytest.mark.parametrize(
    ("kind", "privacy"), [("topk", PrivacyConfig()), ("topk", PRIVACY), ("none", PRIVACY)]
)
def test_a_resumed_run_keeps_residuals_noise_and_epsilon_spent(kind: str, privacy: PrivacyConfig) -> None:
    method = private_method("fedrep", privacy, kind)
    whole, fleet = ran(method, number=3)
    half, before = ran(method, number=2)
    resumed = SequentialClients(toy.clients(), method)
    resumed.restore((id, through_bytes(own)) for id, own in before.personal_state())
    (last,) = rounds.run(method, resumed, Plan(3, seed=3), through_bytes(half[-1].shared), first=3)
    assert fingerprint(last.shared) == fingerprint(whole[-1].shared)
    assert fingerprint(dict(resumed.personal_state())) == fingerprint(dict(fleet.personal_state()))


@pytest.mark.parametrize(
    "method", [compressed("fedrep", "topk"), private_method("fedrep")], ids=["topk", "noise"]
)
def test_many_clients_at_once_send_what_each_would_alone(method: Method) -> None:
    (alone, _), (together, fleet) = ran(method), ran(method, VectorClients)
    assert not fleet.fallback and alone[-1].bytes_up == together[-1].bytes_up
    for path, tensor in tree.leaves(alone[0].shared).items():
        apart = (tree.leaves(together[0].shared)[path] - tensor).abs().max()
        assert apart < 1e-3, path


def test_noise_comes_before_compression_and_before_what_is_kept_back() -> None:
    bare, noisy = compressed("fedavg", "topk", on=toy.net(norm=False)), private_method("fedavg", kind="topk")
    down = steps.broadcast(bare, steps.start(bare), "c0")
    kept = [
        update_codec.sent(method, down, down, steps.start_own(method, "c0"), 1)[1]["head.residual"]
        for method in (bare, noisy)
    ]
    assert not any(t.any() for t in kept[0].values()) and all(
        (t != 0).float().mean() > 0.8 for t in kept[1].values()
    )


def test_epsilon_grows_with_each_update_up_to_the_budget() -> None:
    cost = differential_privacy.cost(PRIVACY)
    method = private_method("fedavg", replace_budget(differential_privacy.epsilon(2.5 * cost, 1e-5)))
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    for number in (1, 2):
        update, own = toy.clients()["c0"].train(method, number, down, own)
        assert update.metrics == {
            EPSILON: pytest.approx(differential_privacy.epsilon(number * cost, 1e-5), rel=1e-6)
        }
    assert update_codec.budget_exhausted(method, own)
    with pytest.raises(PrivacyError, match=r"privacy.epsilon is .* nothing was sent"):
        toy.clients()["c0"].train(method, 3, down, own)
    with pytest.raises(PrivacyError):
        update_codec.sent(method, down, down, own, 1)


def test_clients_without_budget_are_not_selected_and_the_run_ends_when_none_is_left() -> None:
    method = private_method(
        "fedavg", replace_budget(differential_privacy.epsilon(1.5 * differential_privacy.cost(PRIVACY), 1e-5))
    )
    fleet = SequentialClients(toy.clients(), method)
    fleet.personal.put(
        "c1", {**fleet.personal.get("c1"), update_codec.PRIVACY: {update_codec.SPENT: torch.tensor(1e3)}}
    )
    run = rounds.run(method, fleet, Plan(2, seed=3))
    first = next(run)
    assert first.budget_exhausted == ("c1",) and first.responded == ("c0", "c2", "c3", "c4")
    with pytest.raises(
        BudgetExhaustedError, match="round 2: the privacy budget of all 5 clients is exhausted"
    ):
        next(run)


@pytest.mark.parametrize(
    ("name", "norm", "bare"),
    [
        ("fedavg", True, "extractor.buffer:"),
        ("fedproto", False, "prototypes"),
        ("fedkd", False, "change"),
        ("spherefed", False, "sums"),
        ("fedbn", True, "extractor.export_norm"),
    ],
)
def test_what_noise_does_not_cover_is_refused_by_name(name: str, norm: bool, bare: str) -> None:
    method = replace(toy.method(name, toy.net(norm=norm)), privacy=PRIVACY)
    with pytest.raises(MethodError, match=rf"\[privacy\] .* sends {bare}.*noise does not cover"):
        update_codec.require_possible(method)


@pytest.mark.parametrize(
    "name",
    [
        *("local", "fedavg", "fedavg+ft", "fedrep", "lg-fedavg", "ditto", "fedamp", "repper"),
        *("scaffold", "feddyn", "fedntd", "apfl"),
    ],
)
def test_methods_that_send_parameters_alone_can_be_private(name: str) -> None:
    update_codec.require_possible(private_method(name))


def test_a_budget_below_one_update_is_refused_at_once() -> None:
    with pytest.raises(MethodError, match=r"budget = 0.01, expected at least 1\.\d+, the cost of one update"):
        update_codec.require_possible(private_method("fedavg", replace_budget(0.01)))


def replace_budget(budget: float) -> PrivacyConfig:
    return PrivacyConfig(PRIVACY.noise_multiplier, PRIVACY.clip, budget)


def tree_bytes(parts: Parts) -> bytes:
    from edge_fl.wire import tensors

    return tensors.pack(tree.to_arrays(parts))
