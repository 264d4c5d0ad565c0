"""Other brokers than our own mosquitto: one with passwords, and a server that treats every connection in its own way."""

import base64
import contextlib
import hashlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire.mqtt.transport import Endpoint, MqttTransport
from edge_fl.wire.transport import TransportLimits
from edge_fl_broker.find import Program

WAIT_S = 60.0  # on a busy machine; every wait ends with its event
FAST = TransportLimits(max_retry_s=0.2, connect_timeout_s=WAIT_S)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port on loopback that refuses connections, and that no other program gets; one that names it can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def refused(client: MqttTransport, says: str = "") -> str:
    """What `wait_connected` says once an attempt has failed, for the reason `says`; the client must not get a connection."""
    until = time.monotonic() + WAIT_S
    while True:
        with pytest.raises(ConnectError) as caught:
            client.wait_connected(0.02)
        text = str(caught.value)
        if "no attempt yet" not in text and re.search(says, text):
            return text
        assert time.monotonic() < until, text


@contextlib.contextmanager
def broker_that(answers: Callable[[socket.socket], object]) -> Iterator[Endpoint]:
    """A server on loopback that treats every connection in its own way, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    answers(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(WAIT_S)


@contextlib.contextmanager
def password_broker(
    folder: Path, program: Program, certificate: tuple[Path, Path, Path], users: Mapping[str, str]
) -> Iterator[int]:
    """A mosquitto with TLS and passwords instead of client certificates, as managed brokers have them -> its port."""
    _, cert, key = certificate
    with held_port() as port:
        yield from _password_broker(folder, program, port, cert, key, users)


def _password_broker(
    folder: Path, program: Program, port: int, cert: Path, key: Path, users: Mapping[str, str]
) -> Iterator[int]:
    lines = [
        f"listener {port} 127.0.0.1",
        f"certfile {cert}",
        f"keyfile {key}",
        "allow_anonymous false",
        f"password_file {folder / 'passwords'}",
        *(["user root"] if os.geteuid() == 0 else []),
    ]
    (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")
    (folder / "passwords").write_text("".join(f"{user}:{_hashed(word)}\n" for user, word in users.items()))
    (folder / "passwords").chmod(0o600)
    command = [str(program.path), "-c", str(folder / "mosquitto.conf")]
    environment = {**os.environ, **program.environment}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _hashed(password: str) -> str:
    """mosquitto_passwd's format: PBKDF2 with SHA-512."""
    salt = os.urandom(12)
    key = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101, 64)
    return f"$7$101${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}"
