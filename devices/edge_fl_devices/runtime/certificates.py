"""Enrol a device and renew its certificate. The device creates its key and keeps it; only a certificate request is sent.

`enrol` exchanges a claim for a certificate before the agent starts. `Renewal` uses the agent's own connection, because a second one
with the same certificate would replace it; so no round is lost. The new certificate is used from the next connection on.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

from edge_fl.errors import ConnectError, DeadlineError, EdgeFLError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.identity import CERT_FILE, Identity
from edge_fl.wire.messages import CertificateAnswer, CertificateRequest, decode, encode
from edge_fl.wire.mqtt import tls
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connect, Connected, Disconnected, Event, Listener, Packet, Transport

log = logging.getLogger(__name__)

RESEND_S = 10.0
RENEW_AGAIN_S = 600.0
EXPIRY_S = 600


def enrol(claim: Identity, endpoint: Endpoint, fleet: str, connect: Connect, deadline_s: float) -> Identity:
    """Exchange the claim in its folder for this device's own certificate.

    Raises ConnectError if broker or registrar reject it, DeadlineError if neither answers in time: try again.
    """
    topics, until_s = Topics(fleet), time.monotonic() + deadline_s
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = _request(claim)
    transport = connect(claim.name, None, events.put)
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                event = events.get(timeout=min(left_s, RESEND_S))
            except queue.Empty:
                event = Connected(session_present=False)  # send the request again
            match event:
                case Connected():
                    _send(transport, topics, claim, request)
                case Disconnected(reason, final=True):
                    raise ConnectError(f"{claim.device}: broker {endpoint} rejects the claim ({reason})")
                case Packet():
                    answer = decode(event.payload, CertificateAnswer)
                    if answer.id == request.id:
                        return _install(claim, answer, str(endpoint))
    finally:
        transport.close()
    raise DeadlineError(
        f"{claim.device}: no answer to the claim {claim.name} from {endpoint} in {deadline_s:g} s;"
        " expected one from 'edge-fl broker up' where the CA is"
    )


class Renewal:
    """Requests the next certificate after two thirds of this one's life, repeatedly until it arrives."""

    def __init__(
        self,
        device: Identity,
        fleet: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.current = device
        self._topics, self._now = Topics(fleet), now
        self._transport: Transport | None = None
        self._request: CertificateRequest | None = None
        self._again_s = 0.0

    def through(self, connect: Connect) -> Connect:
        """Wrap `connect` so that certificate answers are handled here and all other events by the agent."""

        def connect_with_renewal(client_id: str, will: Packet | None, deliver: Listener, /) -> Transport:
            def on_event(event: Event) -> None:
                answer_topic = self._topics.enrol(self.current.name, "rsp")
                if isinstance(event, Packet) and event.topic == answer_topic:
                    self._on_answer(event)
                    return
                if isinstance(event, Connected):
                    self._store_time()
                deliver(event)

            self._transport = connect(client_id, will, on_event)
            return self._transport

        return connect_with_renewal

    def tick(self) -> None:
        """Send a request if one is due."""
        if self._transport is None or self._now() < self.current.renew_at or time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + RENEW_AGAIN_S
        self._request = _request(self.current)
        _send(self._transport, self._topics, self.current, self._request)

    def _store_time(self) -> None:
        """Store the time as a lower bound of later clocks: the broker accepted the certificate, so the clock was right enough."""
        try:
            tls.record_time(self.current.folder, self._now())
        except OSError as error:
            log.warning("%s: the time of this connection was not stored: %s", self.current.name, error)

    def _on_answer(self, packet: Packet) -> None:
        try:
            answer = decode(packet.payload, CertificateAnswer)
            if self._request is None or answer.id != self._request.id:
                return
            self._request = None
            self.current = _install(self.current, answer, "the registrar")
        except (EdgeFLError, OSError) as error:
            log.warning("%s: certificate not renewed: %s; the current one remains", self.current.name, error)
        else:
            self._again_s = 0.0
            log.info(
                "%s: new certificate, valid until %s", self.current.name, f"{self.current.expires:%Y-%m-%d}"
            )


class CertificateExpiry:
    """When the current certificate of an identity ends; read again when its file changes."""

    def __init__(self, certificate: Identity | None) -> None:
        self._certificate = certificate
        self._written: tuple[int, int] | None = None
        self._until = 0

    def end(self) -> int:
        """Return the end in seconds since 1970; 0 without a certificate."""
        if self._certificate is None:
            return 0
        stat = (self._certificate.folder / CERT_FILE).stat()
        if (written := (stat.st_ino, stat.st_mtime_ns)) != self._written:
            self._until = int(identity.read(self._certificate.folder).expires.timestamp())
            self._written = written
        return self._until


def _send(transport: Transport, topics: Topics, sender: Identity, request: CertificateRequest) -> None:
    transport.subscribe(topics.enrol(sender.name, "rsp"))
    transport.publish(Packet(topics.enrol(sender.name, "req"), encode(request), expiry_s=EXPIRY_S))


def _request(device: Identity) -> CertificateRequest:
    key = identity.pending_key(device.folder)
    secret = device.token.secret if device.token else ""
    return CertificateRequest(secrets.token_hex(8), identity.request(device.device, key).decode(), secret)


def _install(device: Identity, answer: CertificateAnswer, source: str) -> Identity:
    """Replace the claim or certificate by the new certificate. Raises ConnectError for a rejection, ConfigError, OSError."""
    if not answer.certificate:
        raise ConnectError(
            f"{device.device}: {source} issues no certificate ({answer.reason});"
            " expected an unused claim or a valid identity ('edge-fl fleet enrol' makes another)"
        )
    key = identity.pending_key(device.folder)
    return identity.replace(device.folder, answer.certificate.encode(), key)
