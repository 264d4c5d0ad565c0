"""Every page in every state of the registry, in both widths and colour schemes: no error, nothing clipped, nothing serious to axe-core.

EDGE_FL_SCREENSHOTS=FOLDER keeps a picture of each page there; those of README are made by
`EDGE_FL_SCREENSHOTS=docs/images python -m pytest tests/console/dashboard/test_every_page.py -k readme`.
"""

import os
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sqlalchemy import inspect, text

from edge_fl_console.dashboard.pages.fleet import PER_PAGE
from edge_fl_console.dashboard.serve import ROUTES
from edge_fl_server.registry import Database, fleets
from tests.browsing import LOOKS, Visit, dashboard, visiting
from tests.console.dashboard import filled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def pages(device: str, run: str) -> list[str]:
    """The address of every page, with those of a device and a run."""
    return [path.format(id=run if path.startswith("/run") else device) for path in ROUTES]


PAGES = pages(filled.name(filled.WORST), "toy-0")
MISSING = "/no/such/page"
QUERIES = ("/log?search=norm&from=2020-01-01&level=warning", "/fleet?where=agent%3C0.2.0&sort=agent", MISSING)
ALARM = '[role="alert"] .alarm'
ONLINE = 2  # sequence number of the second server


def empty(db: Database, folder: Path) -> None:
    """The registry of a server that has never run."""


def offline(db: Database, folder: Path) -> None:
    filled.fill(db, 60, folder)
    filled.evaluate(db, 60)
    filled.past(db, 60)
    fleets.begin(db, "main", 1)
    fleets.end(db, "main", 1)


def online(db: Database, folder: Path) -> None:
    fleets.begin(db, "main", ONLINE)


def unreadable(db: Database, folder: Path) -> None:
    with db.writing() as connection:
        for table in {"devices", "runs", "reports", "releases", "rollouts"} & {
            *inspect(connection).get_table_names()
        }:
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_"))


STATES = {empty: LOOKS[::3], offline: LOOKS[::3], online: LOOKS, unreadable: LOOKS[::3]}
"""State -> widths and colour schemes. One registry passes through all, as each dashboard takes seconds to start."""
PICTURES = os.environ.get("EDGE_FL_SCREENSHOTS", "")


def looked(visit: Visit, name: str, looks: Sequence[tuple[int, str]]) -> list[str]:
    """The flaws of the open page in each look."""
    flaws = []
    for width, scheme in looks:
        visit.look(width, scheme)
        where = f"{re.sub('[^a-z0-9]+', '-', name).rstrip('-')}-{width}-{scheme}"
        flaws += [f"{where}: {flaw}" for flaw in visit.flaws()]
        if PICTURES:
            visit.page.screenshot(path=Path(PICTURES) / f"{where}.png", full_page=True)
    return flaws


def test_every_page_in_every_state(browser: Any, tmp_path: Path) -> None:
    flaws = []
    registry = tmp_path / "registry.sqlite"
    with closing(Database.open(registry)) as db, dashboard(registry) as service:
        for state, looks in STATES.items():
            state(db, tmp_path)
            with visiting(browser, service.address) as visit:
                for path in PAGES:
                    fleets.beat(db, "main", ONLINE)
                    visit.go(path, ALARM if state is unreadable else ".sheet:visible")
                    flaws += looked(visit, f"{state.__name__}{path}", looks)
                if state is online:  # an open page keeps its contents when the registry fails
                    visit.go("/fleet", "tbody tr")
                    unreadable(db, tmp_path)
                    visit.page.wait_for_selector(ALARM)
                    assert visit.page.locator("tbody tr").count() == PER_PAGE
    assert not flaws, "\n".join(flaws)


CROWDED = pages(f"{filled.LONG}-00000", "toy-2")


@pytest.mark.parametrize("paths", [CROWDED[:3], CROWDED[3:], QUERIES], ids=["devices", "others", "queries"])
@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(LOOKS[::3], id="wide light, narrow dark"),
        pytest.param(LOOKS[1:3], id="wide dark, narrow light", marks=pytest.mark.nightly),
    ],
)
def test_long_names_many_classes_queries_and_errors_in_every_look(
    browser: Any, tmp_path: Path, paths: Sequence[str], looks: Sequence[tuple[int, str]]
) -> None:
    flaws = []
    registry = tmp_path / "registry.sqlite"
    with closing(Database.open(registry)) as db, dashboard(registry) as service:
        filled.fill(db, 20, tmp_path)
        filled.evaluate(db, 20)
        filled.crowd(db, tmp_path)
        fleets.begin(db, "main", 1)
        with visiting(browser, service.address) as visit:
            for path in paths:
                fleets.beat(db, "main", 1)
                visit.go(path, status=404 if path == MISSING else 200)
                flaws += looked(visit, f"crowd{path}", looks)
    assert not flaws, "\n".join(flaws)


@pytest.mark.skipif(not PICTURES, reason="EDGE_FL_SCREENSHOTS is not set")
def test_pictures_for_the_readme(browser: Any, tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    with closing(Database.open(registry)) as db, dashboard(registry) as service:
        filled.fill(db, 24, tmp_path)
        filled.evaluate(db, 24)
        filled.past(db, 24)
        fleets.begin(db, "main", 1)
        with visiting(browser, service.address) as visit:
            for scheme in ("light", "dark"):
                visit.go("/")
                visit.look(1440, scheme)
                path = Path(PICTURES) / f"overview-{scheme}.png"
                visit.page.screenshot(path=path)
                Image.open(path).convert("RGB").save(path, optimize=True)
                assert path.stat().st_size < 250_000
