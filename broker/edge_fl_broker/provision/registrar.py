"""The registrar: answers certificate requests over MQTT, on the machine with the CA's key.

The requester follows from the topic, which the broker restricts to it: a claim requests its device's certificate, a device its next one.
"""

import logging
import queue
from typing import Self

from edge_fl import threads
from edge_fl.errors import EdgeFLError
from edge_fl.logs import LogLimit
from edge_fl.wire import identity
from edge_fl.wire.identity import IdentityError
from edge_fl.wire.messages import CertificateAnswer, CertificateRequest, decode, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Disconnected, Event, Packet
from edge_fl_broker.provision.authority import FOLDERS, Authority

log = logging.getLogger(__name__)

MAX_WAITING = 256
ANSWER_EXPIRY_S = 600


class Registrar:
    """Use in a `with` block. Connects as `registrar` and works on its own thread."""

    def __init__(self, authority: Authority, host: str, port: int, fleet: str) -> None:
        self._authority, self._topics = authority, Topics(fleet)
        self._lines = LogLimit()
        self._waiting: queue.Queue[Event | None] = queue.Queue(MAX_WAITING)
        self._endpoint = identity.read(authority.home / FOLDERS["registrar"]).endpoint(host, port)
        self._thread = threads.lasting(self._work, "edge-fl-registrar")

    def __enter__(self) -> Self:
        # with a session: requests that arrive while the registrar reconnects wait at the broker
        self._transport = MqttTransport(
            self._endpoint, "registrar", None, self._take, session_expiry_s=ANSWER_EXPIRY_S
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()
        self._waiting.put(None)
        self._thread.join()

    def _take(self, event: Event) -> None:
        """Runs on the transport's thread, which must not block: a dropped request is repeated by its sender."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._lines.write(
                log, logging.WARNING, "", "registrar: %d requests queued; one dropped", MAX_WAITING
            )

    def _work(self) -> None:
        while (event := self._waiting.get()) is not None:
            match event:
                case Connected():
                    self._transport.subscribe(self._topics.enrol("+", "req"))
                case Disconnected(reason, final=True):
                    log.error("registrar: %s; no more certificates are issued over MQTT", reason)
                case Packet():
                    try:
                        self._answer(event)
                    except EdgeFLError as error:
                        self._lines.write(log, logging.WARNING, "", "registrar: %s", error)
                    except Exception:
                        log.exception("registrar: request failed; continuing with the next one")

    def _answer(self, packet: Packet) -> None:
        address = self._topics.parse(packet.topic)
        if address.kind != "enrol_req" or not packet.payload:
            return
        request = decode(packet.payload, CertificateRequest)
        try:
            certificate = self._authority.answer(address.device, request.request.encode(), request.secret)
            answer = CertificateAnswer(request.id, certificate.decode())
            log.info("registrar: certificate issued to %s", address.device)
        except IdentityError as error:
            text = "registrar: certificate request of %s rejected: %s"
            self._lines.write(log, logging.WARNING, address.device, text, address.device, error)
            answer = CertificateAnswer(request.id, reason=str(error))
        topic = self._topics.enrol(address.device, "rsp")
        self._transport.publish(Packet(topic, encode(answer), expiry_s=ANSWER_EXPIRY_S))
