"""The choice between float32 and int8: the owner's setting, then measurements."""

from msgspec.structs import replace

from edge_fl.blob import describe
from edge_fl.release.manifests import Manifest, Variant, blobs, decode, encode
from edge_fl_devices.workers.releases import PrecisionLimits, choose_precision
from tests.devices.graphs import graph, manifest_for

SMALL = b"int8" * 300
PLAIN = manifest_for(graph())
BOTH = replace(PLAIN, variants={"int8": Variant(describe(SMALL, 1024), PLAIN.canary, 0.999, 0.001)})
SLOW_MS = 300.0


def test_a_release_without_variants_is_fp32() -> None:
    assert choose_precision(PLAIN, PrecisionLimits("int8"), None, SLOW_MS) == "fp32"


def test_the_owner_s_choice_applies() -> None:
    assert choose_precision(BOTH, PrecisionLimits("int8"), None, 0.0) == "int8"
    assert (
        choose_precision(BOTH, PrecisionLimits("fp32", memory_mb=1), BOTH.chosen("int8"), SLOW_MS) == "fp32"
    )


def test_a_device_measured_as_too_slow_switches_to_int8_and_keeps_it() -> None:
    assert choose_precision(BOTH, PrecisionLimits(), None, 0.0) == "fp32"
    assert choose_precision(BOTH, PrecisionLimits(), PLAIN, 10.0) == "fp32"
    assert choose_precision(BOTH, PrecisionLimits(), PLAIN, SLOW_MS) == "int8"
    assert choose_precision(BOTH, PrecisionLimits(), BOTH.chosen("int8"), 10.0) == "int8"


def test_an_extractor_that_needs_too_much_memory_is_int8() -> None:
    large = replace(BOTH, extractor=describe(bytes(3_000_000)))
    assert choose_precision(large, PrecisionLimits(memory_mb=512), None, 0.0) == "fp32"
    assert choose_precision(large, PrecisionLimits(memory_mb=32), None, 0.0) == "int8"
    assert choose_precision(large, PrecisionLimits(memory_mb=0), None, 0.0) == "fp32"


def test_a_release_as_chosen_is_a_release_with_one_extractor() -> None:
    small = BOTH.chosen("int8")
    assert (small.precision, small.extractor.bytes, small.variants) == ("int8", len(SMALL), {})
    assert BOTH.chosen("fp32") == PLAIN
    assert [found.sha256 for found in blobs(BOTH)] == [PLAIN.extractor.sha256, small.extractor.sha256]
    assert blobs(small) == [small.extractor]
    assert BOTH.extractors == {PLAIN.extractor.sha256, small.extractor.sha256}
    assert decode(encode(BOTH)) == BOTH
    assert isinstance(decode(encode(small)), Manifest)
