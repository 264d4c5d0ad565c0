"""Under any faults a run ends in one named state, counts nothing twice, and logs no unexpected error."""

import logging
from collections import Counter
from pathlib import Path

import pytest

from edge_fl_server.registry import Database, database, registered_reports, runs
from edge_fl_server.runs.results import Results
from tests.chaos.conftest import HEADS_EVERY
from tests.chaos.stage import LONGEST_S, Stage, chaos_of

log = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(LONGEST_S + 60)

TERMINAL = {"completed", "failed", "stopped"}
# Errors logged on purpose; a corrupted and duplicated boot id looks like a copied card.
EXPECTED_ERRORS = ("not trying again", "two machines have its identity")


def test_a_run_ends_in_one_state_and_counts_nothing_twice(
    chaos_seed: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    heads = chaos_seed % HEADS_EVERY == HEADS_EVERY - 1
    ended = Stage(tmp_path, chaos_seed, heads).play()
    state = ended.results.state()
    log.info("seed %d: %s in %.1f s; %s; %s", chaos_seed, state, ended.seconds, ended.happened, ended.errors)
    request.node.user_properties.append(("chaos", state.state))
    assert state.state in TERMINAL
    assert state.state == "completed" or state.reason
    require_one_end(ended.results, tmp_path, state.state)
    require_counted_once(ended.results, tmp_path)
    lost = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [line for line in lost if not any(expected in line for expected in EXPECTED_ERRORS)]


def require_one_end(results: Results, folder: Path, state: str) -> None:
    """Folder and registry agree on the run's final state."""
    db = Database.open(str(folder / "server" / database.FILE))
    try:
        (record,) = runs.listed(db)
        assert (record.run, record.state) == (results.id, state)
    finally:
        db.close()


def require_counted_once(results: Results, folder: Path) -> None:
    """Every round is recorded once, with no more responses than counted reports (late ones apart); every report is counted once."""
    rows = results.rounds()
    assert [row.round for row in rows] == list(range(1, len(rows) + 1))
    db = Database.open(str(folder / "server" / database.FILE))
    try:
        counted = registered_reports.of_run(db, results.id)
    finally:
        db.close()
    assert max(Counter((report.device, report.id) for report in counted).values(), default=1) == 1
    for row in rows:
        updates = {
            report.device for report in counted if report.kind == "update" and report.round == row.round
        }
        assert len(row.responded) <= len(row.selected)
        assert len(row.responded) - len(row.staleness) <= len(updates)
    sent = [report for report in counted if report.kind == "update"]
    assert sum(len(row.responded) for row in rows) <= len(sent)


def test_a_seed_gives_the_same_chaos_again_and_another_seed_another() -> None:
    assert chaos_of(3) == chaos_of(3) != chaos_of(4)
    assert len({repr(chaos_of(seed)) for seed in range(50)}) == 50
