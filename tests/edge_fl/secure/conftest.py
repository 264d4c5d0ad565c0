"""Thirty devices with certificates, made once."""

from collections.abc import Mapping

import pytest

from edge_fl.secure.terms import Member
from tests.edge_fl.secure.cohorts import members


@pytest.fixture(scope="session")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Member]:
    return members(tmp_path_factory.mktemp("identities"), 30)
