"""Whether a server is online, and since when: also one that ended without notice, or that another one replaced."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import update

from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.registry import Database, fleets
from edge_fl_server.registry.fleets import SILENT_S, Presence
from edge_fl_server.registry.tables import servers


@pytest.fixture
def db(tmp_path: Path) -> Database:
    return Database.open(tmp_path / "registry.sqlite")


def test_a_server_is_online_from_its_begin_to_its_end(db: Database) -> None:
    assert fleets.presence(db, "main") == Presence(online=False, since="")
    with Journal(db, "main") as journal:
        assert not fleets.presence(db, "main").online  # it does not hold the lease yet
        journal.begin(1)
        found = fleets.presence(db, "main")
        assert found.online and not fleets.presence(db, "other").online
        assert abs(datetime.now(UTC).timestamp() - datetime.fromisoformat(found.since).timestamp()) < 60
    assert not fleets.presence(db, "main").online and fleets.presence(db, "main").since


def test_a_server_that_ended_without_notice_is_offline_since_its_last_sign_of_life(db: Database) -> None:
    fleets.begin(db, "main", 1)
    fleets.beat(db, "main", 1)
    with db.writing() as connection:
        passed = int(SILENT_S) + 5
        connection.execute(
            update(servers).values(since_s=servers.c.since_s - 900, beat_s=servers.c.beat_s - passed)
        )
    found = fleets.presence(db, "main")
    silent_s = datetime.now(UTC).timestamp() - datetime.fromisoformat(found.since).timestamp()
    assert not found.online and SILENT_S < silent_s < 300
    fleets.beat(db, "main", 1)
    assert fleets.presence(db, "main").online


def test_a_replaced_server_does_not_end_its_successor(db: Database) -> None:
    fleets.begin(db, "main", 1)
    fleets.begin(db, "main", 2)
    fleets.end(db, "main", 1)
    assert fleets.presence(db, "main").online
