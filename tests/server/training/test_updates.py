"""Updates that were asked for compressed or with noise: alike in simulation and over the wire, and refused in any other form."""

import msgspec
import numpy as np
import pytest

from edge_fl.blob import describe
from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.failures import Failure
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.wire import tensors
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan
from tests.server.single_round import one_round

IDS = ("d1", "d2", "d3")


@pytest.mark.parametrize("kind", ["fp16", "int8", "topk"])
def test_devices_and_simulation_agree_to_the_bit_and_the_byte(bench, kind):
    require_agreement(bench, kind)


@pytest.mark.broker
def test_so_they_do_over_a_real_broker(real_bench):
    require_agreement(real_bench, "topk")


def require_agreement(bench, kind):
    plain = bench.spec("fedrep")
    spec = msgspec.structs.replace(plain, compression=CompressionConfig(kind))
    for id in IDS:
        bench.device(id)
    bench.wait_for(full=3)
    simulated = {id: bench.client(id) for id in IDS}
    runs = [
        list(rounds.run(build_method(run_id), fleet, Plan(2, seed=1)))[-1]
        for run_id, fleet in (
            (spec, bench.fleet(spec)),
            (spec, SequentialClients(simulated, build_method(spec))),
            (plain, SequentialClients(simulated, build_method(plain))),
        )
    ]
    assert same(runs[0].shared, runs[1].shared) and not same(runs[0].shared, runs[2].shared)
    assert runs[0].bytes_up == runs[1].bytes_up < runs[2].bytes_up


def unsaid(mode, report, payload):
    """Compressed, but the report does not say so."""
    return [(msgspec.structs.replace(report, compression="none"), payload)]


def uncounted(mode, report, payload):
    """Without a word of what its updates have told."""
    return [(msgspec.structs.replace(report, metrics={}), payload)]


def whole(mode, report, payload):
    """Said to be compressed, but in full precision."""
    parts = tensors.unpack(payload).items()
    payload = tensors.pack({part: {n: a.astype(np.float32) for n, a in t.items()} for part, t in parts})
    return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]


@pytest.mark.parametrize(
    ("tamper", "reason"), [(unsaid, "compression"), (uncounted, "privacy"), (whole, "tensors")]
)
def test_an_update_in_another_form_than_asked_for_does_not_count(bench, tamper, reason):
    plain = bench.spec("fedrep")
    model = msgspec.structs.replace(plain.model, options={**plain.model.options, "norm": False})
    form = {"compression": CompressionConfig("fp16"), "privacy": PrivacyConfig(noise_multiplier=1.0)}
    spec = msgspec.structs.replace(plain, model=model, **form)
    bench.device("d1"), bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, spec)
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in bench.devices[1].acks] == [reason])


def test_a_device_that_has_spent_its_budget_is_asked_no_more(bench):
    def spent(mode, report, payload):
        return [(msgspec.structs.replace(report, blob=None, error=Failure.BUDGET_EXHAUSTED), b"")]

    bench.device("d1"), bench.device("d2", tamper=spent)
    bench.wait_for(full=2)
    method = build_method(bench.spec("fedavg"))
    fleet = bench.fleet(bench.spec("fedavg"))
    first, second = rounds.run(method, fleet, Plan(2, seed=1, cohort=CohortConfig(quorum=0.3)))
    assert (first.selected, first.responded, first.budget_exhausted) == (("d1", "d2"), ("d1",), ())
    assert (second.selected, second.responded, second.budget_exhausted) == (("d1",), ("d1",), ("d2",))
