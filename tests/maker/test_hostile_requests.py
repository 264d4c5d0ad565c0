"""Requests that no program of ours sends, to every route of a device: each is refused, and none fails."""

import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest

from edge_fl_maker.access import HEADER, HttpAccess
from edge_fl_maker.http_server import Service
from tests.maker.labelling.fruit import desk, device, fill
from tests.numbers import WRONG_NUMBERS

REFUSED = range(400, 500)
FORM = "Content-Type: multipart/form-data; boundary"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site:
        yield site.service


def send(service: Service, line: str, *headers: str, body: bytes = b"", length: bool = True) -> int:
    """The status of the answer to a request with these headers as they are."""
    size = [f"Content-Length: {len(body)}"] if length else []
    head = "\r\n".join([f"{line} HTTP/1.1", *size, *headers, "", ""])
    with closing(socket.create_connection(("127.0.0.1", service.port), 60)) as client:
        client.sendall(head.encode("latin-1") + body)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answer:
            words = answer.readline().split()
            return int(words[1]) if words else 0


OWN = ("127.0.0.1", "127.0.0.1:8000", "LOCALHOST", "localhost:1", "[::1]:8000", "127.9.9.9")
OTHERS = (
    "evil.example",
    "evil.example:8000",
    "",
    "[",
    "[::1",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "0.0.0.0",
    "a@b",
    "\xff",
    "10.0.0.7",
)


def test_every_route_checks_the_host(service: Service) -> None:
    """A web site whose name was pointed at this machine reaches nothing: neither pictures nor the page nor the state."""
    routes = [*service.routes, ("GET", "/"), ("GET", "/elsewhere")]
    assert {path for _, path in routes} >= {
        "/label",
        "/label.js",
        "/health",
        "/predict",
        "/frame",
        "/api/label/enter",
    }
    for method, path in routes:
        for host in OTHERS:
            assert send(service, f"{method} {path}", f"Host: {host}", f"{HEADER}: 1") == 403, (path, host)
        twice = ("Host: 127.0.0.1", "Host: evil.example")
        assert (
            send(service, f"{method} {path}", *twice)
            == send(service, f"{method} {path}", *twice[::-1])
            == 403
        )
    for host in (*(f"Host: {own}" for own in OWN), "X: no host"):
        assert send(service, "GET /label", host) == 200 == send(service, "GET /health", host)


def test_with_a_token_the_service_has_any_name(tmp_path: Path) -> None:
    with desk(device(tmp_path), HttpAccess("secret")) as site:
        for host in ("pi.local", "10.0.0.7:8000"):
            assert send(site.service, "GET /health", f"Host: {host}") == 401
            assert send(site.service, "GET /health", f"Host: {host}", "Authorization: Bearer secret") == 200


def test_a_wrong_number_is_refused_wherever_one_is_expected(service: Service) -> None:
    for number in WRONG_NUMBERS:
        plain = unquote_to_bytes(number).decode("latin-1").translate({0: " ", 10: " "})
        if number:  # an empty one is none
            assert send(service, f"POST /predict?top={number}") == 400, number
        assert send(service, "POST /predict", f"Content-Length: {plain}", length=False) in REFUSED, number
        assert send(service, f"GET /label?x={number}&version={number}") == 200
        assert send(service, f"GET /api/label/preview?name={number}&version={number}") == 422, number
        assert send(service, "POST /predict", f"{FORM}*{plain}*=x", body=b"--x") in REFUSED, number
        assert send(service, f"GET /health HTTP/{plain}\r\nX:") in (*REFUSED, 505, 200), number
    for path in ("http://[/health", "http://[::1/health", "//[/health", "http://a:b/health"):
        assert send(service, f"GET {path}") in (*REFUSED, 200), path


BODIES = (
    b"\xff",
    b'{"client":"\xff"}',
    b'{"client":"\\ud800"}',
    b"[" * 100_000,
    b'{"client":' * 10_000,
    b'{"client":1e999}',
    b'{"client":NaN}',
)
BODIES += (
    b'{"client":' + b"9" * 5000 + b"}",
    b"\xfe\xff\x00{",
    b'{"client":"me","name":"\xff\xfe"}',
    b'{"client":"me","name":"\x00"}',
)


def test_a_body_that_is_no_json_is_refused(service: Service) -> None:
    for method, path in service.routes:
        for body in BODIES if method == "POST" and path != "/api/label/enter" else ():
            assert send(service, f"POST {path}", f"{HEADER}: 1", body=body) in (*REFUSED, 503), (
                path,
                body[:20],
            )


def test_random_damage_to_requests_is_refused(service: Service) -> None:
    choose = random.Random(32)
    valid = [
        b"POST /predict?top=2 HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 30"
        b"\r\n\r\n--x\r\nfilename\r\n\r\nabc\r\n--x--\r\n  ",
        b"POST /api/label/skip HTTP/1.1\r\nHost: 127.0.0.1:80\r\nX-Edge-FL: 1\r\nCookie: edge_fl_token=a\r\nContent-Length: 36"
        b'\r\n\r\n{"client":"a","name":"b","version":1}',
        b"GET /api/label/preview?name=a.png&version=00 HTTP/1.1\r\nHost: [::1]:80\r\nOrigin: http://[::1]:80\r\n\r\n",
    ]
    for _ in range(300):
        request = bytearray(choose.choice(valid))
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(request))
            request[at : at + choose.randint(0, 3)] = choose.choice(
                [b"", b"[", b"\xff", b"9" * 30, b"-", b"%00", b":", b"=", b"\r\n", b"e9"]
            )
        with closing(socket.create_connection(("127.0.0.1", service.port), 60)) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as answer:
                assert b" 500 " not in answer.readline(), bytes(request)
