"""Kept releases for tests of commands."""

from functools import partial
from pathlib import Path

import pytest

from edge_fl.wire.topics import Topics
from edge_fl_server.registry import Database, fleets, rollouts
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.commands import ReleaseCommands
from tests.devices import graphs
from tools.memory_broker import InMemoryBroker, InMemoryTransport


@pytest.fixture
def releases(broker: InMemoryBroker, tmp_path: Path) -> ReleaseCommands:
    """Two releases are kept, and the first one is served."""
    repository = Repository(tmp_path / "home" / "main")
    transport = InMemoryTransport(broker, "publisher", None, lambda event: None)
    publisher = Publisher(transport, Topics("main"), repository)
    for number in (1, 2):
        payload = graphs.graph(weights=graphs.WEIGHTS * number)
        manifest = graphs.manifest_for(payload, release=number)
        publisher.publish(manifest, {manifest.extractor.sha256: payload})
    transport.close()
    db = Database.open(tmp_path / "server" / "registry.sqlite")
    fleets.claim(db, "main")
    number = rollouts.begin(db, "main", 1)
    rollouts.advance(db, rollouts.get(db, number), state="completed")
    return ReleaseCommands(partial(InMemoryTransport, broker), "main", tmp_path / "home", db)
