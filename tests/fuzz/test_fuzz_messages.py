"""Mutated messages and manifests give a value that survives a round trip, or one error type."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError, ProtocolError
from edge_fl.release import manifests
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import MESSAGES, decode, encode
from tests.fuzz.mutate import mutated_text, mutated_trees, to_json
from tests.fuzz.valid import structs

KINDS = sorted({*MESSAGES.values(), Blob}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_message_with_mutations_is_rejected_or_survives_a_round_trip(
    kind: type[Struct], data: st.DataObject
) -> None:
    payload = _spoilt(kind, data)
    try:
        message = decode(payload, kind)
    except ProtocolError as error:
        assert len(str(error)) < 400
        return
    assert decode(encode(message), kind) == message


@given(data=st.data())
def test_a_manifest_with_mutations_is_rejected_or_survives_a_round_trip(data: st.DataObject) -> None:
    payload = _spoilt(Manifest, data)
    try:
        manifest = manifests.decode(payload)
    except ArtefactError as error:
        assert error.why == "manifest"
        return
    assert manifests.decode(manifests.encode(manifest)) == manifest


@given(data=st.data())
def test_entries_of_signed_metadata_with_mutations_are_rejected_or_give_a_manifest(
    data: st.DataObject,
) -> None:
    entry = {"manifest": _spoilt(Manifest, data).decode("utf-8", "replace"), "serial": 1}
    tree = data.draw(st.one_of(st.just([entry]), mutated_trees([entry], raw=("null",))))
    try:
        found = [entry.read() for entry in manifests.listed(json.loads(to_json(tree)))]
    except (ArtefactError, json.JSONDecodeError, TypeError):
        # python-tuf always gives a list
        return
    assert all(isinstance(manifest, Manifest) for manifest in found)


def _spoilt(kind: type[Struct], data: st.DataObject) -> bytes:
    tree = json.loads(msgspec.json.encode(data.draw(structs(kind))))
    return data.draw(mutated_text(to_json(data.draw(mutated_trees(tree)))))
