"""A head-only device sends only the parts that its signed release names, computed by functions of its own."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_fl import heads
from edge_fl.errors import ArtefactError
from edge_fl.heads import HeadPlan
from edge_fl.release import manifests
from edge_fl.wire import tensors
from edge_fl_devices import config
from edge_fl_devices.workers import head_updates
from tests.devices import graphs

Z, Y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2
HEAD = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


def sent(plan: HeadPlan, kind: str = "nearest", extras: Any = None) -> dict[str, Any] | None:
    """The head update of a fit on 20 samples."""
    extras = {"head": HEAD} if extras is None else extras
    release = graphs.manifest_for(b"x", heads=plan)
    head = heads.fit(kind, Z, Y, 2, unit_norm=False, plan=plan, extras=extras)
    payload = head_updates.head_update(release, head, Z, Y, extras)
    return tensors.unpack(payload) if payload else None


def test_without_a_plan_nothing_is_sent() -> None:
    assert sent(HeadPlan()) is None


def test_only_the_parts_that_the_release_names_are_sent() -> None:
    found = sent(HeadPlan(uploads={"prototypes": "class_means"}))
    assert (
        found is not None
        and found.keys() == {"prototypes"}
        and found["prototypes"]["count"].tolist() == [10, 10]
    )


def test_a_part_that_the_release_does_not_name_is_held_back() -> None:
    payload = tensors.pack({"prototypes": HEAD, "features": {"z": Z}})
    with pytest.raises(ArtefactError, match="'features', the release requests prototypes; nothing was sent"):
        head_updates.require_named(payload, HeadPlan(uploads={"prototypes": "class_means"}))


def test_a_part_that_cannot_be_computed_drops_the_head_update_only() -> None:
    assert sent(HeadPlan(uploads={"head": "trained_head"}, lr=1e9, epochs=50, weight_decay=1e9)) is None
    assert sent(HeadPlan(uploads={"other": "trained_head"})) is None
    assert sent(HeadPlan(uploads={"head": "fitted_head"})) is None  # the owner chose another kind


def test_a_server_cannot_request_unknown_parts() -> None:
    tree = msgspec.to_builtins(graphs.manifest_for(b"x"))
    for strange in ("features", "labels", "images", "own_head", ""):
        tree["heads"] = {"uploads": {"prototypes": strange}}
        with pytest.raises(ArtefactError, match="uploads"):
            manifests.decode(msgspec.json.encode(tree))


def test_an_extra_whose_file_contains_another_part_is_rejected(tmp_path: Path) -> None:
    good, bad, other = (tmp_path / name for name in ("good", "bad", "other"))
    good.write_bytes(tensors.pack({"head": HEAD}))
    bad.write_bytes(b"\x80\x04nothing")
    other.write_bytes(tensors.pack({"extractor": HEAD}))
    assert head_updates.read_extras({"head": good})["head"].keys() == HEAD.keys()
    for file in (bad, other):
        with pytest.raises(ArtefactError, match="extra 'head'"):
            head_updates.read_extras({"head": file})


def test_an_owner_can_switch_head_updates_off() -> None:
    tree: dict[str, object] = {"id": "pi", "data": "x", "uploads": False}
    assert (
        not config.convert(tree, "here").uploads and config.convert({"id": "pi", "data": "x"}, "here").uploads
    )
