"""Who may see the dashboard, who may do what there, and what the audit log says about it."""

import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from edge_fl.wire.roles import ACTIONS, PERSON_ROLES
from edge_fl_console import tokens
from edge_fl_console.dashboard import actions
from edge_fl_console.dashboard.auth import ACCESS, LoginMiddleware
from edge_fl_server.registry import Database, audit, registered_devices, rollouts
from edge_fl_server.registry.tables import tokens as table
from tests.browsing import dashboard, run_coroutine, visiting
from tests.console.dashboard import filled

HOST = "http://fleet.example:8080"
MAY = {
    "viewer": set(),
    "releaser": {"start", "again", "resume", "rollback", "pause", "abort"},
    "operator": {"stop", "admit", "revoke", "pause", "abort"},
}
"""Role -> buttons that it may press, written out by hand: the table is not to grade itself."""


def test_every_button_is_an_action_of_the_table_and_every_role_may_view() -> None:
    assert set(actions.ACTIONS) <= set(ACTIONS)
    assert ACTIONS["view"].roles == set(PERSON_ROLES) == set(MAY)


def ask(db: Database, method: str = "GET", path: str = "/", **request: Any) -> httpx.Response:
    """One request to a page that answers with who it was."""

    def page(request: Any) -> PlainTextResponse:
        person = request.scope[ACCESS].person
        return PlainTextResponse(f"{person.name} {person.known_by} {','.join(sorted(person.roles))}")

    app = LoginMiddleware(
        Starlette(routes=[Route("/", page)]), "", partial(tokens.find, db, "main"), required=True
    )

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as client:
            return await client.request(method, path, **request)

    return run_coroutine(get())


def test_a_personal_token_opens_the_dashboard_until_it_ends(tmp_path: Path) -> None:
    with closing(Database.open(tmp_path / "registry.sqlite")) as db:
        secret = tokens.create(db, "main", "ann", ["viewer", "operator"], 90, "root")
        (stored,) = tokens.listed(db, "main")
        assert secret not in str(stored) and stored.used_at == ""
        bearer = {"headers": {"authorization": f"Bearer {secret}"}}
        assert ask(db, **bearer).text == "ann token operator,viewer"
        assert tokens.listed(db, "main")[0].used_at
        assert ask(db).status_code == 401 and "type=password" in ask(db).text
        assert ask(db, headers={"authorization": f"Bearer {secret}x"}).status_code == 401
        assert (
            ask(
                db, headers={"cookie": f"edge_fl_token={secret}", "origin": "http://evil.example"}
            ).status_code
            == 403
        )

        entered = ask(db, "POST", "/login", data={"token": secret})
        cookie = entered.headers["set-cookie"]
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert ask(db, headers={"cookie": cookie.partition(";")[0]}).text.startswith("ann")
        assert "Unknown token" in ask(db, "POST", "/login", data={"token": "efl_wrong"}).text
        assert 'edge_fl_token=""' in ask(db, "POST", "/logout").headers["set-cookie"]

        again = tokens.renew(db, "main", "ann", 7, "root")
        assert ask(db, **bearer).status_code == 401, "renewing replaces the secret"
        bearer = {"headers": {"authorization": f"Bearer {again}"}}
        assert ask(db, **bearer).text.startswith("ann")
        with db.writing() as connection:
            connection.execute(update(table).values(expires_s=int(time.time()) - 1))
        assert ask(db, **bearer).status_code == 401
        bearer = {"headers": {"authorization": f"Bearer {tokens.renew(db, 'main', 'ann', 7, 'root')}"}}
        assert ask(db, **bearer).text.startswith("ann")
        tokens.revoke(db, "main", "ann")
        assert ask(db, **bearer).status_code == 401
        assert tokens.find(db, "main", tokens.create(db, "other", "bo", ["viewer"], 1, "root")) is None


NAMES = "(found) => found.map((each) => each.dataset.act.split(':')[0])"
PRESS = """(act) => { const at = document.querySelector('[data-act]'); at.dataset.act = act; at.click(); }"""


@pytest.mark.browser
@pytest.mark.timeout(200)
def test_every_role_does_what_it_should_on_the_dashboard_and_nothing_else(
    browser: Any, tmp_path: Path
) -> None:
    """A page of each role sends every action, also those whose buttons it does not show."""
    registry = tmp_path / "registry.sqlite"
    with closing(Database.open(registry)) as db:
        filled.fill(db, 20, tmp_path)
        registered_devices.quarantine(
            db, "main", filled.name(3), "3 reports rejected, the last one because of norm (912)"
        )
        number = rollouts.begin(db, "main", 3, previous=2, plan={"stages": [0.05, 1.0]})
        secrets = {role: tokens.create(db, "main", role, [role], 1, "root") for role in MAY}
        run = "toy-1"
        targets = {"start": "1", "stop": run, "admit": filled.name(3), "revoke": filled.name(4)}
        with dashboard(registry, "--login", "--home", str(tmp_path / "releases")) as service:
            for role, secret in secrets.items():
                with visiting(browser, service.address) as visit:
                    visit.page.goto(f"{service.address}/?token={secret}")
                    visit.go("/releases")
                    visit.page.wait_for_selector("[data-act]", state="attached")
                    shown = visit.page.locator("[data-act]:visible").evaluate_all(NAMES)
                    assert set(shown) == MAY[role] & {"pause", "abort", "rollback"}
                    assert visit.page.inner_text(".person span") == role
                    allowed = set()
                    for action in actions.ACTIONS:
                        visit.page.evaluate(PRESS, f"{action}:{targets.get(action, number)}")
                        asked = visit.page.locator(".q-dialog h2")
                        refused = visit.page.locator(
                            ".q-notification", has_text=f"{action}: {role} (token) has {role}, expected"
                        )
                        asked.or_(refused).first.wait_for()
                        if asked.count():
                            allowed.add(action)
                            visit.page.click(".q-dialog .choice button >> nth=0")
                            asked.wait_for(state="detached")
                    assert allowed == MAY[role], role
                    if role == "operator":
                        for name in ("server", "--help", "viewer-ann", "pi-elsewhere"):
                            visit.page.evaluate(PRESS, f"revoke:{name}")
                            refused = visit.page.locator(".q-notification", has_text=f"{name}")
                            refused.filter(has_text="nothing was changed").first.wait_for()
                        visit.page.evaluate(PRESS, f"pause:{number}")
                        visit.page.click("#confirm")
                        visit.page.locator(
                            ".q-notification", has_text="Pause of release 3 requested"
                        ).wait_for()
                    if role == "viewer":
                        tokens.revoke(db, "main", "viewer")
                        visit.page.locator("[role=alert]", has_text="revoked: reload the page").wait_for()
        assert rollouts.get(db, number).desired == "paused"
        done, *rest = (
            row for row in audit.listed(db, "main") if row.who == "operator" and row.result == audit.DONE
        )
        assert (done.known_by, done.action, done.target, rest) == ("token", "pause", str(number), [])
        refused = {(row.who, row.action) for row in audit.listed(db, "main") if "expected" in row.result}
        forbidden = {(role, action) for role in MAY for action in set(actions.ACTIONS) - MAY[role]}
        assert refused == forbidden | {("operator", "revoke")}  # of what is no device
