from pathlib import Path

import pytest

from edge_fl_server.release.publish import store
from edge_fl_server.release.repository import Repository
from tests.releases import MakeRelease


@pytest.fixture
def released(tmp_path: Path, make_release: MakeRelease) -> Repository:
    """A repository with release 1."""
    repository = Repository(tmp_path / "server")
    store(repository, *make_release(1))
    return repository
