"""The journal: screened updates in the registry, and quarantine that follows from them."""

from __future__ import annotations

import pytest

from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.registry import devices, reports


@pytest.fixture
def journal():
    return Journal(fleet="main", quarantine_after=3)


def test_repeated_outliers_are_quarantined_by_name(journal):
    for round in (1, 2, 3):
        assert not journal.blocked("d2")
        scores = {"d1": 0.1, "d2": 8.0 + round}
        journal.record_screening("r1", round, scores, {"d2": f"norm {8 + round} times the median"})
    assert (journal.blocked("d1"), journal.blocked("d2")) == ("", "quarantined")
    d1, d2 = devices.listed(journal.db, "main")
    assert (d1.outlier_score, d2.outlier_score) == (0.1, 11.0)
    assert d2.quarantine == "3 reports rejected, the last one because of outlier (norm 11 times the median)"
    found = [(one.device, one.round, one.reason) for one in reports.rejections_of(journal.db, "main")]
    assert found == [("d2", 3, "outlier"), ("d2", 2, "outlier"), ("d2", 1, "outlier")]
    assert reports.rejections_of(journal.db, "main")[0].detail == "norm 11 times the median"


def test_a_readmitted_device_starts_at_zero(journal):
    for round in (1, 2, 3):
        journal.record_screening("r1", round, {"d2": 2.0}, {"d2": "direction"})
    devices.readmit(journal.db, "main", "d2")
    (d2,) = devices.listed(journal.db, "main")
    assert (d2.blocked, d2.rejections, d2.outlier_score) == ("", 0, 0.0)
