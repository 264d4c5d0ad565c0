"""Sinks for alerts: a mail server and a webhook on loopback, which keep what they receive."""

import json
import socket
import threading
from asyncio import Server
from collections.abc import Coroutine, Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session


class MailSink:
    """Accepts every mail; `received` are (subject, body)."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        mail = message_from_bytes(envelope.content)
        part = next(part for part in mail.walk() if part.get_content_maintype() == "text")
        body = part.get_payload(decode=True)
        assert isinstance(body, bytes)
        self.received.append((str(mail["Subject"]), body.decode()))
        return "250 OK"


class HookSink(ThreadingHTTPServer):
    """Accepts every request from `listen` on, and refuses connections before; `received` are (title, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server_bind()

    def listen(self) -> None:
        self.server_activate()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    """Keeps the JSON of Apprise."""

    def do_POST(self) -> None:
        content: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, HookSink)
        self.server.received.append((content["title"], content["message"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Bound(Controller):
    """Serves on a socket that is bound already."""

    def __init__(self, sink: MailSink, bound: socket.socket) -> None:
        super().__init__(sink, hostname="127.0.0.1", port=bound.getsockname()[1])
        self._bound = bound

    def _create_server(self) -> Coroutine[Any, Any, Server]:
        return self.loop.create_server(self._factory_invoker, sock=self._bound)


@pytest.fixture
def mail() -> Iterator[tuple[MailSink, str]]:
    """The sink, and the URL of its channel."""
    sink, bound = MailSink(), socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    controller = Bound(sink, bound)
    controller.start()
    yield sink, f"mailto://127.0.0.1:{port}/?from=edge-fl@example.org&to=ops@example.org"
    controller.stop()


@pytest.fixture
def hook() -> Iterator[tuple[HookSink, str]]:
    """The sink, and the URL of its channel."""
    sink = HookSink()
    sink.listen()
    yield sink, f"json://127.0.0.1:{sink.port}/alerts"
    sink.shutdown()
    sink.server_close()
