"""Limits of one update, at their ends: norms and the shapes of what is aggregated."""

import math

import pytest
import torch
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.blob import Blob
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.fields import MAX_SAMPLES
from edge_fl.learn.tree import Params
from edge_fl.methods.contract import steps
from edge_fl.wire.messages import MAX_JSON_BYTES, Report
from edge_fl_server.mqtt.updates.validation import (
    MAX_DOWN_BYTES,
    RejectedError,
    UpdateTerms,
    parts_check,
    require_numbers,
)
from tests.edge_fl.methods import toy

SPEC = MethodSpec(ModelConfig(), toy.INPUT, ["a", "b"], MethodConfig(), 0)
REPORT = Report("r", "update", "boot", 5)


def head(norm: float) -> Params:
    """A head of this L2 norm, its weights all equal."""
    params = toy.net().head.init()
    elements = sum(t.numel() for t in params.values())
    return {name: torch.full_like(t, norm / math.sqrt(elements)) for name, t in params.items()}


@pytest.mark.parametrize(
    ("growth", "norm", "passes"), [(2.0, 7.9, True), (2.0, 8.1, False), (3.0, 8.1, True), (0.0, 1e9, True)]
)
def test_a_part_may_grow_to_a_multiple_of_one_plus_its_norm(growth: float, norm: float, passes: bool) -> None:
    check = parts_check(toy.method("fedavg"), UpdateTerms(SPEC, {"head": 3.0}, growth))
    if passes:
        check({"head": head(norm)}, REPORT)
    else:
        with pytest.raises(RejectedError, match=r"norm: head: norm 8\.1, at most 8"):
            check({"head": head(norm)}, REPORT)


@pytest.mark.parametrize("name", ["feddbe", "fedas", "fedetf"])
def test_statistics_that_would_change_the_shape_of_the_aggregate_are_rejected(name: str) -> None:
    method = toy.method(name)
    check = parts_check(method, UpdateTerms(SPEC, {}, 0.0))
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    up, _ = steps.local_update(method, down, own, toy.batches())
    check(up, REPORT)
    (part,) = up.keys() & {"feature_mean", "fisher", "scale"}
    key, tensor = next(iter(up[part].items()))
    with pytest.raises(RejectedError, match="parts"):
        check({**up, part: {**up[part], key: torch.stack([tensor, tensor])}}, REPORT)


def test_more_samples_than_a_board_holds_are_rejected_by_field() -> None:
    counted = {metrics.TEST_SAMPLES: float(MAX_SAMPLES)}
    require_numbers(replace(REPORT, samples=MAX_SAMPLES, metrics=counted), [metrics.TEST_SAMPLES])
    with pytest.raises(RejectedError, match=r"samples: 10000001, expected at most 10000000"):
        require_numbers(replace(REPORT, samples=MAX_SAMPLES + 1), [])
    counted[metrics.TEST_SAMPLES] += 1
    with pytest.raises(RejectedError, match=r"metrics: test_samples: 1e\+07 is out of range"):
        require_numbers(replace(REPORT, metrics=counted), [metrics.TEST_SAMPLES])


@pytest.mark.parametrize("blob", [None, Blob("0" * 64, 1000, ["0" * 64])])
def test_bytes_that_no_report_can_have_are_rejected(blob: Blob | None) -> None:
    """One report of 1 TiB would be the traffic of the whole fleet."""
    most = replace(REPORT, blob=blob, bytes_down=MAX_DOWN_BYTES)
    most = replace(most, bytes_up=MAX_JSON_BYTES + (blob.bytes if blob else 0))
    require_numbers(most, [])
    with pytest.raises(RejectedError, match=rf"metrics: bytes_up: {most.bytes_up + 1}, expected at most"):
        require_numbers(replace(most, bytes_up=most.bytes_up + 1), [])
    with pytest.raises(
        RejectedError, match=r"metrics: bytes_down: 1099511627776, expected at most 2147483648"
    ):
        require_numbers(replace(most, bytes_down=2**40), [])
