"""The egress manifest names what may leave a device, and everything else stays."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.config import CompressionConfig, MethodConfig, MethodSpec, ModelConfig, PrivacyConfig
from edge_fl.errors import ArtefactError
from edge_fl.inputs import InputSpec
from edge_fl.methods import METHODS, build_method
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import head_plan, of_full, of_method
from edge_fl.wire import tensors
from edge_fl.wire.egress import Egress, of_head
from edge_fl.wire.messages import Report

ALLOWED = Egress("full", {"update": ["extractor"]})


def sample(name: str) -> Method:
    classes = [str(label) for label in range(10)]
    return build_method(
        MethodSpec(ModelConfig("cnn2"), InputSpec((3, 32, 32)), classes, MethodConfig(name), 0)
    )


def report(kind: str = "update", **numbers: float) -> Report:
    return Report("r1", kind, "b1", 10, numbers)  # type: ignore[arg-type]


def parts(*names: str) -> bytes:
    return tensors.pack({name: {"w": np.zeros(3, np.float32)} for name in names})


def test_what_is_listed_may_leave() -> None:
    ALLOWED.require(report(**{metrics.PERSONAL_AFTER: 0.5}), parts("extractor"))
    ALLOWED.require(report(), None)


@pytest.mark.parametrize(
    ("said", "blob", "named"),
    [
        (report(), parts("extractor", "head"), "part 'head'"),
        (report("personal"), parts("extractor"), "part 'extractor'"),
        (report(**{"mean.brightness": 0.5}), None, "number 'mean.brightness'"),
    ],
)
def test_unlisted_numbers_and_parts_do_not_leave(said: Report, blob: bytes | None, named: str) -> None:
    with pytest.raises(ArtefactError, match=f"{named} may not leave this device") as refused:
        ALLOWED.require(said, blob)
    assert refused.value.why == "rejected"


def test_devices_add_to_sums_of_class_statistics_only_and_full_ones_not_under_noise() -> None:
    of_head(()).require_sum("statistics")
    full = of_full(sample("fedavg"))
    full.require_sum("statistics")
    private = of_full(replace(sample("fedavg"), privacy=PrivacyConfig(noise_multiplier=1.0, clip=1.0)))
    for egress, subject in ((of_head(()), "features"), (full, "features"), (private, "statistics")):
        with pytest.raises(ArtefactError, match=f"sum of {subject!r} may not leave this device") as refused:
            egress.require_sum(subject)
        assert refused.value.why == "rejected"


def test_parts_leave_only_with_the_required_compression_and_noise() -> None:
    form = CompressionConfig("int8"), PrivacyConfig(noise_multiplier=1.0)
    asked = of_full(replace(sample("fedper"), compression=form[0], privacy=form[1]))
    assert (asked.compression, asked.privacy) == form
    told = msgspec.structs.replace(report(**{metrics.EPSILON: 9.9}), compression="int8")
    asked.require(told, parts("extractor"))
    with pytest.raises(ArtefactError, match="compression 'none' may not leave"):
        asked.require(msgspec.structs.replace(told, compression="none"), parts("extractor"))
    with pytest.raises(ArtefactError, match=r"update without privacy\.epsilon"):
        asked.require(msgspec.structs.replace(told, metrics={}), parts("extractor"))


def test_under_privacy_head_only_devices_send_no_parts() -> None:
    method = replace(sample("fedcrl"), privacy=PrivacyConfig(noise_multiplier=1.0))
    assert sample("fedcrl").head_updates() and not head_plan(method, 8).uploads
    assert of_method(method)[1].parts == {"head": []}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_personal_part_of_any_method_may_leave(name: str) -> None:
    method = sample(name)
    personal = {part for part, spec in method.parts.items() if not spec.travels}
    for egress in of_method(method):
        for listed in egress.parts.values():
            assert not personal & set(listed)
        assert {"images", "labels", "features"}.isdisjoint(egress.numbers)
        assert set(egress.messages) == {
            "state",
            "meta",
            "rpt",
            "req",
            "log",
            "echo",
            "sum_reply",
            "query_reply",
        }
    assert set(head_plan(method, 8).uploads) <= set(of_head(method.head_tier.updates).parts["head"])
    assert of_full(method).parts["update"] == of_full(method).parts["personal"]
