"""Selections of a fleet from the registry: tags, attributes, groups, and the time of a large fleet."""

import time

import pytest

from edge_fl_server import selectors
from edge_fl_server.registry import Database, registered_devices, registered_tags
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.selectors import SelectorError

ABLE = {"tier": "head", "machine": "aarch64", "memory_mb": 2000, "samples": 40}


@pytest.fixture
def db(database_url: str):
    opened = Database.open(database_url)
    yield opened
    opened.close()


def test_devices_are_selected_by_tags_attributes_and_groups(db: Database) -> None:
    registered_devices.record(
        db,
        [
            DeviceRecord("main", "pi-01", "ready", release=3, capability={**ABLE, "drift": 2.5}),
            DeviceRecord("main", "pi-02", "lost", release=2, capability={**ABLE, "tier": "full"}),
            DeviceRecord("main", "pi-03"),
            DeviceRecord("other", "pi-04", "ready", capability=ABLE),
        ],
    )
    registered_tags.change(db, "main", ["pi-01", "pi-03"], {"site": "berlin", "line": "2"})
    registered_tags.change(db, "other", ["pi-04"], {"site": "berlin"})
    registered_devices.quarantine(db, "main", "pi-02", "flooding")
    registered_tags.save_group(db, "main", "healthy", "status=ready and not standing=*")
    for text, expected in {
        "site=berlin": "pi-01 pi-03",
        "site=berlin and line=2 and not tier=*": "pi-03",
        "standing=quarantined": "pi-02",
        "@healthy": "pi-01",
        "release>=3 and drift>2 and memory_mb=2000 and arch=aarch64": "pi-01",
        "samples>39": "pi-01 pi-02",
        "*": "pi-01 pi-02 pi-03",
    }.items():
        assert selectors.selected(db, "main", text) == expected.split(), text
    registered_tags.change(db, "main", ["pi-01"], {"site": ""})
    assert selectors.selected(db, "main", "site=*") == ["pi-03"]
    registered_tags.remove_group(db, "main", "healthy")
    with pytest.raises(SelectorError, match="expected a saved group"):
        selectors.selected(db, "main", "@healthy")


def test_removed_devices_are_not_selected_and_their_tags_not_named(db: Database) -> None:
    registered_devices.record(db, [DeviceRecord("main", f"pi-0{number}", "ready") for number in range(1, 5)])
    registered_tags.change(db, "main", ["pi-01", "pi-02"], {"site": "berlin"})
    registered_tags.change(db, "main", ["pi-03"], {"colour": "red"})
    registered_devices.rename(db, "main", "pi-01", "kitchen")
    registered_devices.remove(db, "main", "pi-03", "decommissioned")
    assert registered_devices.names(db, "main") == ["kitchen", "pi-02", "pi-04"]
    assert selectors.selected(db, "main", "*") == ["kitchen", "pi-02", "pi-04"]
    assert selectors.selected(db, "main", "site=berlin or colour=*") == ["kitchen", "pi-02"]
    hint = selectors.mistyped(db, "main", selectors.parsed(db, "main", "colour=red"))
    assert hint.startswith("; no device has the tag 'colour' (tags: site; attributes: name, status, ")
    registered_devices.readmit(db, "main", "pi-03")
    assert selectors.selected(db, "main", "colour=red") == ["pi-03"]


def test_enrolment_does_not_bring_back_what_the_operator_changed(db: Database) -> None:
    given = {"pi-01": {"site": "berlin", "line": "2"}, "pi-02": {"site": "paris"}}
    registered_tags.enrolled(db, "main", given)
    registered_tags.change(db, "main", ["pi-01"], {"site": "paris", "line": ""})
    registered_tags.enrolled(db, "main", given)
    assert registered_tags.of_devices(db, "main") == {"pi-01": {"site": "paris"}, "pi-02": {"site": "paris"}}


def test_three_tags_of_ten_thousand_devices_are_compared_quickly(tmp_path) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    names = [f"pi-{number:05}" for number in range(10_000)]
    registered_devices.record(db, [DeviceRecord("main", name, capability=ABLE) for name in names])
    for number, site in enumerate(("berlin", "paris")):
        registered_tags.change(
            db, "main", names[number::2], {"site": site, "line": str(number), "kind": "camera"}
        )
    took = []
    for _ in range(5):
        began = time.process_time()
        found = selectors.selected(db, "main", "site=berlin and kind=camera and not line=1")
        took.append(time.process_time() - began)
    db.close()
    assert len(found) == 5_000
    assert min(took) < 1.0  # of processor time; the target is 0.2 s (docs/tags.md)
