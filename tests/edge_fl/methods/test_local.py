"""Local: nothing is sent, and clients are independent of each other (docs/methods-global.md, "Local")."""

from edge_fl.learn import tree
from tests.edge_fl.methods import toy


def test_no_tensor_is_sent_in_either_direction() -> None:
    run = toy.federate(toy.method("local"))
    assert not any(down for downs in run.downs for down in downs.values())
    assert not any(update.parts for updates in run.updates for update in updates.values())
    assert run.shared == {}


def test_results_do_not_depend_on_who_else_there_is() -> None:
    alone = toy.federate(toy.method("local"), cohort=lambda number: ["c0"])
    together = toy.federate(toy.method("local"))
    assert tree.same(alone.own["c0"], together.own["c0"])
    assert not tree.same(together.own["c0"], together.own["c1"])
