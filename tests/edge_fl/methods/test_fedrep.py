"""FedRep: stage 1 trains only the head, stage 2 only the extractor (docs/methods-personal-heads.md, "FedRep")."""

from edge_fl.learn import tree
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy


def test_heads_never_leave_their_clients() -> None:
    run = toy.federate(toy.method("fedrep"))
    assert all(update.parts.keys() == {"extractor"} for updates in run.updates for update in updates.values())
    assert not tree.same(run.own["c0"]["head"], run.own["c4"]["head"])


def test_each_stage_leaves_the_others_part_alone() -> None:
    # no second stage: the extractor is as it came, BatchNorm included
    method = toy.method("fedrep", epochs=0)
    run = toy.federate(method)
    assert tree.same(run.shared, run.history[0])
    assert not tree.same(run.own["c0"]["head"], steps.start_own(method, "c0")["head"])
    method = toy.method("fedrep", head_epochs=0)  # no first stage: the head is as it was
    run = toy.federate(method)
    assert not tree.same(run.shared, run.history[0])
    assert tree.same(run.own["c0"], steps.start_own(method, "c0"))


def test_the_extractor_learns_under_the_head_of_this_round() -> None:
    method = toy.method("fedrep")
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    up, new = method.local_update(down, own, toy.batches())
    late = toy.method("fedrep", head_epochs=0)
    assert tree.same(up["extractor"], late.local_update(down, new, toy.batches())[0]["extractor"])


def test_the_last_head_may_be_refitted_on_the_final_extractor() -> None:
    for epochs in (0, 2):
        run = toy.federate(toy.method("fedrep", final_head_epochs=epochs))
        down = steps.broadcast(run.method, run.shared, "c0")
        up, own = steps.personalise(run.method, down, run.own["c0"], toy.batches(round=2))
        assert up == {}
        assert tree.same(own, run.own["c0"]) == (epochs == 0)
