"""Sinks for alerts: a mail server and a webhook on loopback, which keep what they receive."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

from edge_fl_broker.mosquitto import free_port
from tests.server.registry.conftest import database_url  # noqa: F401


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
    """Accepts every request; `received` are (title, body)."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.received: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


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


@pytest.fixture
def mail() -> Iterator[tuple[MailSink, str]]:
    """The sink, and the URL of its channel."""
    sink, port = MailSink(), free_port("127.0.0.1")
    controller = Controller(sink, hostname="127.0.0.1", port=port)
    controller.start()
    yield sink, f"mailto://127.0.0.1:{port}/?from=edge-fl@example.org&to=ops@example.org"
    controller.stop()


@pytest.fixture
def hook() -> Iterator[tuple[HookSink, str]]:
    """The sink, and the URL of its channel."""
    sink = HookSink()
    yield sink, f"json://127.0.0.1:{sink.server_address[1]}/alerts"
    sink.shutdown()
    sink.server_close()
