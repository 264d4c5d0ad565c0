import msgspec
import numpy as np
import pytest

from edge_fl.blob import digest
from edge_fl.errors import ArtefactError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import scaled
from edge_fl.release.manifests import Canary, canary_input, decode, encode, listed


def test_a_manifest_survives_the_wire(make_release):
    manifest, _ = make_release(3)
    assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"release": 0}, "release"),
        ({"feature_dim": 10**12}, "feature_dim"),
        ({"min_onnxruntime": "latest"}, "min_onnxruntime"),
        ({"extras": {"../../etc/passwd": None}}, "extras"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_field_that_is_not_allowed_is_refused_by_name(make_release, change, complaint):
    tree = msgspec.to_builtins(make_release(3)[0])
    if "extras" in change:
        change = {"extras": dict.fromkeys(change["extras"], tree["extractor"])}
    with pytest.raises(ArtefactError, match=complaint):
        decode(msgspec.json.encode(tree | change))


def test_a_chunk_list_that_does_not_fit_the_length_is_refused(make_release):
    tree = msgspec.to_builtins(make_release(3)[0])
    tree["extractor"]["chunks"].pop()
    with pytest.raises(ArtefactError, match="chunks, expected 4"):
        decode(msgspec.json.encode(tree))


@pytest.mark.parametrize("features", [[[0.5]], [[0.5], []], [[0.5], [1.0] * 5]])
def test_a_canary_whose_rows_do_not_fit_is_refused(make_release, features):
    tree = msgspec.to_builtins(make_release(3)[0])
    tree["canary"]["features"] = features
    with pytest.raises(ArtefactError, match="canary has"):
        decode(msgspec.json.encode(tree))


def test_canary_input_are_the_same_everywhere_and_look_like_scaled_pixels():
    images = canary_input(Canary(seed=7, images=2, features=[[0.0], [0.0]]), InputSpec((3, 5, 5)))
    assert images.shape == (2, 3, 5, 5)
    assert images.dtype == np.float32
    pixels = np.rint(images * 255).astype(np.uint8)
    assert np.array_equal(scaled(pixels), images)
    # Golden: a change here would break every canary already signed.
    assert digest(pixels.tobytes()) == "44c3891da5a60b0565641c7ab26fee658890449ee5b8aca8bce265ed6c5c4511"


def test_another_seed_gives_other_images():
    first, second = (canary_input(Canary(seed, 1, [[0.0]]), InputSpec((1, 8, 8))) for seed in (1, 2))
    assert not np.array_equal(first, second)


WEIRD = [None, True, -1, 10**30, 0.5, "", "x" * 10_000, [], {}, [[]], {"": None}]


@pytest.mark.parametrize("weird", WEIRD, ids=lambda value: str(value)[:12])
def test_a_wrong_value_in_any_field_is_refused_or_read_and_nothing_else(make_release, weird):
    tree = msgspec.to_builtins(make_release(3)[0])
    places = [(tree, key) for key in tree]
    places += [(tree[part], key) for part in ("canary", "extractor", "input", "extras") for key in tree[part]]
    refused = 0
    for part, key in places:
        value, part[key] = part[key], weird
        try:
            decode(msgspec.json.encode(tree))
        except ArtefactError:
            refused += 1
        part[key] = value
    assert refused >= len(places) // 2


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff", b"null", b"[" * 100_000, b'{"release": ' + b"[" * 100_000]
)
def test_bytes_that_are_no_manifest_are_refused(payload):
    with pytest.raises(ArtefactError, match="release not installed"):
        decode(payload)


def test_releases_are_listed_in_the_order_of_publication(make_release):
    entries = [
        {"manifest": encode(make_release(number)[0]).decode(), "serial": -number} for number in (1, 2, 3)
    ]
    assert [entry.read().release for entry in listed(entries)] == [3, 2, 1]


@pytest.mark.parametrize("entry", [None, {}, {"manifest": 3, "serial": 1}, {"manifest": "x"}, "text"])
def test_an_invalid_entry_is_rejected(entry):
    with pytest.raises(ArtefactError, match="signed metadata"):
        listed([entry])
