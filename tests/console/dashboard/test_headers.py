"""Headers of all responses, and requests that no browser of ours sends: none is answered with a failure."""

import socket
from contextlib import closing
from http.client import parse_headers
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from edge_fl_console.dashboard.headers import SAFE, Headers
from edge_fl_server.registry import Database
from tests.browsing import Dashboard, dashboard, visiting
from tests.console.dashboard import filled
from tests.numbers import WRONG_NUMBERS


def answer(service: Dashboard, request: str, body: bytes = b"") -> tuple[int, dict[str, str]]:
    """Send a request as it is: its status and its headers."""
    return whole(service, request, body)[:2]


def whole(service: Dashboard, request: str, body: bytes = b"") -> tuple[int, dict[str, str], str]:
    """Send a request as it is: its status, its headers and its text."""
    address = urlsplit(service.address)
    with closing(socket.create_connection((address.hostname, address.port or 0), 30)) as connection:
        connection.sendall(request.encode("latin-1") + body)
        with connection.makefile("rb") as file:
            status = int(file.readline().split()[1])
            headers = {name.lower(): value for name, value in parse_headers(file).items()}
            return status, headers, file.read().decode(errors="replace")


def get(path: str, host: str = "127.0.0.1", more: str = "", method: str = "GET") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n"


def require_safe(headers: dict[str, str]) -> None:
    assert {name: headers.get(name) for name in SAFE} == SAFE
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe-inline" not in policy["script-src"] and "nonce-" in policy["script-src"]


@pytest.mark.timeout(120)
def test_no_request_fails_and_every_response_has_the_headers(tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    with closing(Database.open(registry)) as db:
        filled.fill(db, 3, tmp_path)
    form = "Content-Type: application/x-www-form-urlencoded\r\n"
    numbers = [f"/{page}?page={number}" for number in WRONG_NUMBERS for page in ("fleet", "data")]
    with dashboard(registry) as service:
        expected = {
            **{
                get(path): 200
                for path in ("/", "/fleet", "/metrics", "/log?level=%00", "/device/%00", "/run/-1", *numbers)
            },
            **{
                get(f"/{path}?sort=%00&down={number}"): 200 for path in ("fleet",) for number in WRONG_NUMBERS
            },
            get("/no/such/page"): 404,
            **{
                get("/", host): 403
                for host in ("evil.example", "[", "[::1", "127.0.0.1:99999999999", "a:b:c", "", "\xff")
            },
            **{
                get("/", more=f"Origin: {origin}\r\n"): 403
                for origin in ("http://evil.example", "http://[", "//[", "null", "\xff")
            },
            get("/login", more=f"{form}Content-Length: 5\r\n", method="POST") + "token": 401,
            get("/login", more=f"{form}Content-Length: 99999\r\n", method="POST") + "x" * 99999: 401,
            get("/login", more=f"{form}Content-Length: 200\r\n", method="POST") + "a=&" * 66 + "a=": 401,
            get("/login", more="Content-Type: multipart/form-data\r\nContent-Length: 4\r\n", method="POST")
            + "\xff\xfe--": 401,
            get("/logout", more="Content-Length: 0\r\n", method="POST"): 303,
        }
        expected.pop(get("/", "127.0.0.1:99999999999"))  # a name of this machine, whatever its port
        for request, status in expected.items():
            found, headers = answer(service, request)
            assert found == status, request[:200]
            require_safe(headers)


def test_a_failure_has_the_headers_too() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("on purpose")

    response = TestClient(Headers(fails)).get("/")
    assert (response.status_code, response.text) == (500, "internal error\n")
    require_safe(dict(response.headers))


PAGE = "Accept: text/html,application/xhtml+xml\r\n"


@pytest.mark.timeout(120)
def test_a_browser_gets_errors_as_pages_with_a_way_back_and_a_program_as_text(tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    Database.open(registry).close()
    with dashboard(registry) as service:
        for request, status, title in (
            (get("/no/such/page", more=PAGE), 404, "No such page"),
            (get("/_nicegui/x", more=PAGE), 404, "No such page"),
            (get("/", "evil.example", more=PAGE), 403, "Not allowed"),
        ):
            found, headers, body = whole(service, request)
            assert (found, headers["content-type"]) == (status, "text/html; charset=utf-8")
            require_safe(headers)
            assert f"<h1>{title}</h1>" in body and 'href="/"' in body
            nonce = headers["content-security-policy"].partition("'nonce-")[2].partition("'")[0]
            assert f'<script nonce="{nonce}">' in body
        found, headers, body = whole(service, get("/no/such/page"))
        assert (found, body) == (404, "not found\n") and headers["content-type"].startswith("text/plain")


def test_a_page_that_fails_says_so_and_a_response_that_began_is_not_changed() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("on purpose")

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("fleet 1\n", 200)(scope, receive, send)

    accept = {"accept": "text/html"}
    failed = TestClient(Headers(fails)).get("/", headers=accept)
    assert failed.status_code == 500 and "<h1>This page failed</h1>" in failed.text
    assert "on purpose" not in failed.text
    require_safe(dict(failed.headers))
    assert TestClient(Headers(answers)).get("/", headers=accept).text == "fleet 1\n"


FRAME = "data:text/html,<iframe src='{}'></iframe>"
MARKUP = """() => document.body.insertAdjacentHTML("beforeend",
  "<img src=x: onerror='window.ran = 1'><a id=js href='javascript:window.ran = 2'>x</a>")"""

SCRIPT = (
    "() => document.head.append(Object.assign(document.createElement('script'), {text: 'window.ran = 3'}))"
)


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_no_other_site_frames_a_page_and_no_script_in_a_text_runs(browser: Any, tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    Database.open(registry).close()
    with dashboard(registry) as service, visiting(browser, service.address) as visit:
        visit.go("/")
        visit.page.evaluate(MARKUP)
        visit.page.evaluate("() => document.getElementById('js').click()")
        visit.page.evaluate(SCRIPT)
        assert visit.page.evaluate("() => window.ran") is None
        refused = [each for each in visit.complaints if "Content Security Policy" in each]
        assert [each.split()[2:5] for each in refused if "Loading the image" not in each] == [
            ["inline", "event", "handler"],
            ["the", "JavaScript", "URL"],
            ["inline", "script", "violates"],
        ]
        visit.page.goto(FRAME.format(service.address))
        visit.page.frames[1].wait_for_load_state()
        assert visit.page.frames[1].url.startswith("chrome-error:")
        visit.complaints.clear()
