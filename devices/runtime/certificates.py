"""How a device comes by its certificate, and by the next one: the key is made here and stays here, a request travels, an answer comes.

`enrol` turns a claim into a certificate before the agent starts. `Renewal` rides on the agent's own connection, because a second one with
the same certificate would throw the first one out: no round is lost over it, and the new certificate serves from the next connection on.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

from devices.runtime.interfaces import DeviceConnect
from edge_fl.errors import ConnectError, DeadlineError, EdgeFLError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.identity import Identity
from edge_fl.wire.messages import CertificateAnswer, CertificateRequest, decode, encode
from edge_fl.wire.mqtt import tls
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Listener, Packet, Transport

log = logging.getLogger(__name__)

ANSWER_S = 10.0
AGAIN_S = 600.0
EXPIRY_S = 600


def enrol(claim: Identity, endpoint: Endpoint, fleet: str, connect: DeviceConnect, deadline_s: float) -> Identity:
    """Turns the claim in its folder into this device's own certificate.

    Raises ConnectError when the broker or the registrar refuses it, DeadlineError when neither answers in time: try again.
    """
    topics, until_s = Topics(fleet), time.monotonic() + deadline_s
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    asked = _request(claim)
    transport = connect(claim.name, None, events.put)
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                event = events.get(timeout=min(left_s, ANSWER_S))
            except queue.Empty:
                event = Connected(session_present=False)  # ask again
            match event:
                case Connected():
                    transport.subscribe(topics.enrol_response(claim.name))
                    transport.publish(
                        Packet(topics.enrol_request(claim.name), encode(asked), expiry_s=EXPIRY_S)
                    )
                case Disconnected(reason, final=True):
                    raise ConnectError(
                        f"{claim.device}: broker {endpoint} refuses the claim ({reason}); stopped"
                    )
                case Packet():
                    answer = decode(event.payload, CertificateAnswer)
                    if answer.id == asked.id:
                        return _install(claim, answer, endpoint)
    finally:
        transport.close()
    raise DeadlineError(
        f"{claim.device}: no answer to the claim {claim.name} from {endpoint} in {deadline_s:g} s;"
        " expected one from 'edge-fl broker up' where the CA is"
    )


class Renewal:
    """Asks for the next certificate once two thirds of this one's life are over, and again every so often until it comes."""

    def __init__(
        self,
        found: Identity,
        fleet: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.current = found
        self._topics, self._now = Topics(fleet), now
        self._transport: Transport | None = None
        self._asked: CertificateRequest | None = None
        self._again_s = 0.0

    def through(self, connect: DeviceConnect) -> DeviceConnect:
        """The same way to connect; answers for us are taken from what the agent hears."""

        def connected(client_id: str, will: Packet | None, deliver: Listener, /) -> Transport:
            def hear(event: Event) -> None:
                if isinstance(event, Packet) and event.topic == self._topics.enrol_response(
                    self.current.name
                ):
                    self._take(event)
                    return
                if isinstance(event, Connected):
                    self._remember()
                deliver(event)

            self._transport = connect(client_id, will, hear)
            return self._transport

        return connected

    def tick(self) -> None:
        """Asks if it is time; costs nothing before."""
        if self._transport is None or self._now() < self.current.renew_at or time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + AGAIN_S
        self._asked = _request(self.current)
        self._transport.subscribe(self._topics.enrol_response(self.current.name))
        topic = self._topics.enrol_request(self.current.name)
        self._transport.publish(Packet(topic, encode(self._asked), expiry_s=EXPIRY_S))

    def _remember(self) -> None:
        """The broker let us in, so the clock was right enough: it will not be earlier than now."""
        try:
            tls.saw(self.current.folder, self._now())
        except OSError as error:
            log.warning("%s: the time of this connection was not kept: %s", self.current.name, error)

    def _take(self, packet: Packet) -> None:
        try:
            answer = decode(packet.payload, CertificateAnswer)
            if self._asked is None or answer.id != self._asked.id:
                return
            self._asked = None
            self.current = _install(self.current, answer, None)
        except (EdgeFLError, OSError) as error:
            log.warning("%s: no new certificate: %s; the old one serves on", self.current.name, error)
        else:
            self._again_s = 0.0
            log.info("%s: a new certificate, until %s", self.current.name, f"{self.current.expires:%Y-%m-%d}")


def _request(found: Identity) -> CertificateRequest:
    key = identity.pending_key(found.folder)
    secret = found.token.secret if found.token else ""
    return CertificateRequest(secrets.token_hex(8), identity.request(found.device, key).decode(), secret)


def _install(found: Identity, answer: CertificateAnswer, endpoint: Endpoint | None) -> Identity:
    """Puts the answer in the place of what it was asked with. Raises ConnectError for a refusal, ConfigError, OSError."""
    if not answer.certificate:
        raise ConnectError(
            f"{found.device}: {endpoint or 'the registrar'} gives no certificate ({answer.reason});"
            " expected a claim that was not used, or an identity that holds ('edge-fl fleet enrol' makes another)"
        )
    key = identity.pending_key(found.folder)
    return identity.replace(found.folder, answer.certificate.encode(), key)
