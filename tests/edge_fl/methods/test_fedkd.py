"""FedKD: a student sent in low-rank factors and a personal teacher (docs/methods-personal-models.md, "FedKD" and F10)."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods import fedkd
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.methods.fedkd import LEFT
from tests.edge_fl.methods import toy

STUDENT = ("extractor", "head")


def distance(a: Parts, b: Parts) -> float:
    leaves = tree.leaves(b)
    return max(float((t.double() - leaves[path].double()).abs().max()) for path, t in tree.leaves(a).items())


def student(parts: Parts) -> Parts:
    return {name: parts[name] for name in STUDENT}


def trained(method: Method, client: str = "c0") -> tuple[Parts, Parts, Parts]:
    """(what the client received, the change it made, its personal parts) of round 1."""
    down, own = steps.broadcast(method, steps.start(method), client), steps.start_own(method, client)
    up, new = method.local_update(down, own, toy.batches(client))
    return down, up, new


def test_clients_send_the_students_change_and_receive_the_student() -> None:
    run = toy.federate(toy.method("fedkd"))
    assert all(u.parts.keys() == {"change"} for updates in run.updates for u in updates.values())
    assert all(down.keys() == set(STUDENT) for downs in run.downs for down in downs.values())
    sent = {name for u in run.updates[0].values() for name in u.parts["change"]}
    assert not any("personal" in name or "alignment" in name for name in sent)


def test_teachers_differ_and_start_as_the_student_alignments_differ_from_the_start() -> None:
    method = toy.method("fedkd")
    first, second = (steps.start_own(method, client) for client in ("c0", "c1"))
    assert tree.same(first["personal_extractor"], steps.start(method)["extractor"])
    assert not tree.same(first["alignment"], second["alignment"])
    run = toy.federate(method)
    assert not tree.same(run.own["c0"]["personal_head"], run.own["c1"]["personal_head"])


def test_one_step_follows_the_gradient_of_the_whole_loss() -> None:
    """Teacher, student and alignment move at once against one gradient, that of the weights 1/(CE_t + CE_s) included."""
    method = toy.method("fedkd", toy.flat_net(), max_norm=0.0, detach_weight=False)
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    own = {**own, "personal_head": tree.map(lambda t: 1.5 * t, own["personal_head"])}
    data = toy.batches(batch_size=64)
    up, new = method.local_update(down, own, data)
    w = tree.map(lambda t: t.clone().requires_grad_(), {**down, **own})
    net, x = method.net, data.x.float() / 255
    z_s, z_t = net.extractor(w["extractor"], x), net.extractor(w["personal_extractor"], x)
    s, t = net.head(w["head"], z_s), net.head(w["personal_head"], z_t)
    run_id = F.cross_entropy(s, data.y) + F.cross_entropy(t, data.y)
    both = [
        F.kl_div(F.log_softmax(a, 1), F.softmax(b, 1), reduction="batchmean") for a, b in ((s, t), (t, s))
    ]
    hidden = F.mse_loss(z_t, z_s @ w["alignment"]["weight"].T)
    (run_id + (both[0] + both[1] + 2 * hidden) / run_id).backward()
    expected = tree.map(lambda p: -0.05 * p.grad, w)
    found = {**tree.shaped(up["change"], down), **{n: tree.map(torch.sub, new[n], own[n]) for n in own}}
    assert distance(expected, found) < 1e-6
    other = replace(method, detach_weight=not method.detach_weight).local_update(down, own, data)[1]
    assert not tree.same(other, new)


def test_gradients_are_clipped_to_a_joint_norm() -> None:
    method = toy.method("fedkd", toy.flat_net(), max_norm=0.01, optimiser=Sgd(1.0))
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    up, new = method.local_update(down, own, toy.batches(batch_size=64))  # one step
    moved = [*tree.leaves(up).values(), *tree.leaves(tree.map(torch.sub, new, own)).values()]
    assert torch.stack([(t**2).sum() for t in moved]).sum().sqrt() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("compress", ["update", "parameters"])
def test_all_the_energy_gives_the_plain_mean_of_students(compress: str) -> None:
    method = toy.method("fedkd", energy=1.0, last_energy=1.0, compress=compress)
    run = toy.federate(method, rounds=1)
    down, students = run.downs[0]["c0"], []
    for client in run.clients:
        up = trained(toy.method("fedkd"), client)[1]["change"]
        students.append(tree.map(torch.add, down, tree.shaped(up, down)))
    for path, tensor in tree.parameters(student(run.shared)).items():
        mean = torch.stack([tree.leaves(s)[path] for s in students]).mean(0)
        assert torch.allclose(tensor, mean, atol=1e-5), path


def test_less_energy_is_less_to_send_and_never_more_than_the_student() -> None:
    method = toy.method("fedkd")
    down, up, _ = trained(method)
    whole = tree.size_bytes(down)
    sizes = [tree.size_bytes(replace(method, energy=t).pack(up)) for t in (0.5, 0.95, 1.0)]
    assert sizes[0] < sizes[1] <= sizes[2] <= whole
    assert any(name.endswith(LEFT) for name in replace(method, energy=0.5).pack(up)["change"])


@pytest.mark.parametrize("compress", ["update", "parameters"])
def test_the_server_makes_the_mean_change_thin_too(compress: str) -> None:
    """With almost no energy every matrix changes by rank 1."""
    method = toy.method("fedkd", toy.flat_net(), energy=0.0, last_energy=0.0, compress=compress)
    run = toy.federate(method, rounds=1)
    before, after = (run.history[n]["extractor"]["extractor.linear.weight"] for n in (0, 1))
    change = after - before if compress == "update" else after
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 1


def test_clients_count_equally() -> None:
    method = toy.method("fedkd", energy=1.0, last_energy=1.0)
    _, up, _ = trained(method)
    shared = steps.start(method)
    one, other = (
        method.aggregate(shared, [Update("a", n, up), Update("b", 1, tree.map(torch.zeros_like, up))])
        for n in (1, 99)
    )
    assert tree.same(one, other)


@pytest.mark.parametrize("compress", ["update", "parameters"])
def test_a_student_without_updates_stays(compress: str) -> None:
    method = toy.method("fedkd", energy=1.0, compress=compress)
    shared = steps.start(method)
    for updates in ([], [Update("a", 3, {})]):
        assert distance(method.aggregate(shared, updates), shared) < 1e-5


def test_energy_rises_from_round_to_round_to_its_last_value() -> None:
    method = toy.method("fedkd", rounds=10)
    assert method.at(1).energy == pytest.approx(0.953)
    assert method.at(10).energy == pytest.approx(0.98)
    assert method.at(50).energy == pytest.approx(0.98)
    of_the_run = replace(toy.method("fedkd"), total_rounds=10)
    assert [of_the_run.at(number).energy for number in (1, 10)] == pytest.approx([0.953, 0.98])


def test_clients_predict_with_their_teacher_and_the_global_model_is_the_student() -> None:
    run = toy.federate(toy.method("fedkd"))
    net, own, x = run.method.net, run.own["c0"], run.images("c0")
    z = net.extractor.frozen(own["personal_extractor"], x)
    assert torch.equal(run.predict("c0"), net.head.frozen(own["personal_head"], z))
    z = net.extractor.frozen(run.shared["extractor"], x)
    found = steps.predict_global(run.method, run.shared, x)
    assert torch.equal(found, net.head.frozen(run.shared["head"], z))


def low_rank(rows: int, columns: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(rows, rank, generator=draw) @ torch.randn(rank, columns, generator=draw)


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (0.9, 2), (0.95, 3), (1.0, 3)])
def test_the_rank_keeps_the_share_of_energy(energy: float, rank: int) -> None:
    assert fedkd.rank(torch.tensor([3.0, 2.0, 1.0]), energy) == rank


def test_a_matrix_of_zeros_has_rank_one() -> None:
    assert fedkd.rank(torch.zeros(4), 0.95) == 1


def test_factors_with_all_the_energy_are_lossless() -> None:
    params = {
        "conv.weight": low_rank(8, 36, 3).reshape(8, 4, 3, 3),
        "linear.weight": torch.randn(6, 7),
        "bias": torch.ones(5),
    }
    back = fedkd.multiplied(fedkd.factorised(params, 1.0), params)
    assert back.keys() == params.keys()
    assert all(torch.allclose(back[name], params[name], atol=1e-5) for name in params)


def test_a_low_rank_matrix_is_sent_as_two_thin_factors() -> None:
    thin = fedkd.factorised({"conv.weight": low_rank(8, 36, 2).reshape(8, 4, 3, 3)}, 0.999)
    assert {name: tuple(t.shape) for name, t in thin.items()} == {
        "conv.weight~left": (8, 2),
        "conv.weight~right": (2, 36),
    }


def test_factors_that_are_larger_than_the_matrix_are_not_sent() -> None:
    params = {"weight": torch.eye(6), "bias": torch.ones(6), "scale": torch.tensor(2.0)}
    thin = fedkd.factorised(params, 0.95)
    assert tree.same(thin, params)
    assert toy.count(fedkd.factorised({"weight": low_rank(6, 6, 1)}, 0.95)) == 12


def test_less_energy_drops_the_smallest_singular_values() -> None:
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    back = fedkd.multiplied(fedkd.factorised({"weight": matrix}, 0.9), {"weight": matrix})["weight"]
    assert torch.allclose(back.diagonal()[:3], torch.tensor([3.0, 2.0, 0.0]), atol=1e-6)
