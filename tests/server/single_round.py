"""One round of training by devices, and the same by simulation."""

from edge_fl.methods import build_method
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan


def one_round(bench, spec, *, shared=None, quorum=0.3, **limits):
    """Round 1 with all present devices -> (fleet, result)."""
    method = build_method(spec)
    fleet = bench.fleet(spec, **limits)
    plan = Plan(1, seed=1, cohort=CohortConfig(quorum=quorum))
    return fleet, next(rounds.run(method, fleet, plan, shared))


def simulated_round(bench, spec, ids):
    method = build_method(spec)
    fleet = SequentialClients({id: bench.client(id) for id in ids}, method)
    return next(rounds.run(method, fleet, Plan(1, seed=1)))
