"""Brokers that no mosquitto can play: a server on loopback that treats every connection in its own way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from edge_fl.wire.mqtt.transport import Endpoint
from edge_fl.wire.transport import TransportLimits

FAST = TransportLimits(max_retry_s=0.2, connect_timeout_s=1.0)


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
        thread.join(5)
