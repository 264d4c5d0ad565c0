"""Secure sums over the devices that are online: send each stage, wait for the replies, go on when all have arrived or time is up.

A device that leaves, or that has not replied by the deadline of a stage, has dropped out. Nothing is requested from fewer devices than the
minimum, and nothing is known of a sum that does not complete.

Every step is signed for its device. The registry remembers the number of the signature that opened the last sum for which a vector of a
device arrived, and every opening repeats it: a device whose folder was restored from a backup learns that it has sent more than it knows.
"""

import logging
import queue
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue

from cryptography import x509

from edge_fl import toml
from edge_fl.config import PrivacyConfig
from edge_fl.errors import ConfigError, SecureSumError
from edge_fl.failures import Failure
from edge_fl.secure.server import Sum, SumServer
from edge_fl.wire.messages import MAX_SUM_DEVICES, SumReply, SumRequest, SumStep
from edge_fl_server.mqtt.connection import ReceivedMessage
from edge_fl_server.mqtt.session import Server
from edge_fl_server.registry import registered_devices

log = logging.getLogger(__name__)

POLL_S = 0.25


@dataclass(frozen=True)
class SumOptions:
    """How to compute secure sums.

    `minimum` devices, 3 or more, take part, or nothing is sent; more than `max_devices` are sampled. A sum needs `threshold` of its cohort.
    Without `masked` the server sees every vector; for fleets without certificates. With `noise_multiplier` each vector is clipped to the
    norm `clip`, and the sum satisfies differential privacy with `delta`.
    """

    minimum: int = 5
    threshold: float = 2 / 3
    stage_s: float = 60.0
    lost_s: float = 5.0
    max_devices: int = MAX_SUM_DEVICES
    masked: bool = True
    clip: float = 0.0
    noise_multiplier: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.noise_multiplier and not self.clip:
            raise ConfigError(
                "secure sum: noise_multiplier without clip; expected the largest norm of a vector"
            )

    def request(self, subject: str, release: int, length: int) -> SumRequest:
        """The request with these options. Raises ConfigError for one that is out of range."""
        given = {"subject": subject, "release": release, "length": length}
        own = {name: value for name, value in asdict(self).items() if name in SumRequest.__struct_fields__}
        return toml.checked(given | own, SumRequest, "secure sum")


class SecureSums:
    """Computes sums over the devices of a connected server; `ca`: certificates (PEM) of the fleet's CA, None without one."""

    def __init__(self, server: Server, ca: bytes | None) -> None:
        self._server, self._connection = server, server.connection
        self._authorities = x509.load_pem_x509_certificates(ca) if ca else []
        self._replies: dict[str, SimpleQueue[ReceivedMessage]] = {}  # of open sums, by id
        self._opened: dict[str, int] = {}  # number of the opening of the present sum, by device
        self._connection.on("sum_reply", self._on_message)
        self._connection.on("sum_chunk", self._on_message)

    def collect(
        self,
        subject: str,
        release: int,
        length: int,
        options: SumOptions = SumOptions(),
        devices: Collection[str] | None = None,
    ) -> Sum:
        """The sum of the vectors that the devices online (or those of `devices`) offer for `subject` and `release`.

        Raises SecureSumError if too few take part or remain, ConfigError for invalid options.
        """
        request = options.request(subject, release, length)
        id = f"{subject}-{release}-{secrets.token_hex(8)}"
        journal = self._server.journal
        opened = SumServer(
            self._connection.topics.fleet,
            id,
            request,
            self._invited(options, devices),
            self._authorities,
            last=registered_devices.last_sums(journal.db, journal.fleet),
        )
        self._replies[id] = SimpleQueue()
        try:
            self._run(opened, options)
        finally:
            del self._replies[id]
            for device, step in opened.settled().items():
                self._send(device, step, options)
        assert opened.result is not None
        return replace(opened.result, epsilon=_epsilon(options))

    def _invited(self, options: SumOptions, devices: Collection[str] | None) -> list[str]:
        """Devices that are online, at most `max_devices`. Raises SecureSumError below the minimum."""
        roster = self._server.roster
        online = {*roster.head_devices(), *roster.full_devices()}
        invited = sorted(online if devices is None else online & set(devices))
        if len(invited) < options.minimum:
            raise SecureSumError(
                f"{len(invited)} devices are online, {options.minimum} needed",
                Failure.TOO_FEW,
                "nothing was requested",
            )
        return secrets.SystemRandom().sample(invited, min(len(invited), options.max_devices))

    def _run(self, opened: SumServer, options: SumOptions) -> None:
        steps = opened.open()
        while steps:
            for device, step in steps.items():
                self._send(device, step, options)
            self._receive(opened, options)
            steps = opened.advance()
        if opened.dropped:
            found = ", ".join(f"{device} ({why})" for device, why in sorted(opened.dropped.items()))
            log.info("secure sum %s: without %s", opened.id, found)

    def _send(self, device: str, step: SumStep, options: SumOptions) -> None:
        step = self._connection.signed("sum", device, step, lasts=True)
        if step.stage == "open":
            self._opened[device] = step.signature.number if step.signature else 0
        self._connection.publish(self._connection.topics.down(device, "sum"), step, expiry_s=options.stage_s)

    def _receive(self, opened: SumServer, options: SumOptions) -> None:
        """Take replies until none is missing or the stage's time is up."""
        until = time.monotonic() + options.stage_s
        while waiting := opened.waiting:
            self._connection.check()
            try:
                received = self._replies[opened.id].get(
                    timeout=max(0.0, min(until - time.monotonic(), POLL_S))
                )
                self._take(opened, received)
                continue
            except queue.Empty:
                late = time.monotonic() >= until
            except SecureSumError as error:
                lines, sender = self._server.journal.lines, received.address.device
                lines.write(log, logging.WARNING, sender, "secure sum %s: %s", opened.id, error.message)
                continue
            for device in waiting:
                if late or self._server.roster.gone_for(device) > options.lost_s:
                    opened.drop(device, Failure.DEADLINE if late else Failure.LOST)

    def _take(self, opened: SumServer, received: ReceivedMessage) -> None:
        device, message = received.address.device, received.message
        if self._server.journal.blocked(device):
            opened.drop(device, Failure.BLOCKED)
        elif isinstance(message, SumReply):
            if message.stage == opened.stage == "vector" and device in opened.waiting:
                journal = self._server.journal  # before the vector counts
                registered_devices.record_sum(journal.db, journal.fleet, device, self._opened.get(device, 0))
            opened.take(device, message)
        elif isinstance(message, bytes):
            _, index = received.address.path
            opened.take_chunk(device, opened.id, int(index), message)

    def _on_message(self, received: ReceivedMessage) -> None:
        """Pass a message on to its sum, on the receive thread."""
        message = received.message
        id = message.id if isinstance(message, SumReply) else next(iter(received.address.path), "")
        if waiting := self._replies.get(id):
            waiting.put(received)


def _epsilon(options: SumOptions) -> float:
    """The epsilon of a device's vector in one sum, if all devices of the threshold add their noise; 0 without noise."""
    if not options.noise_multiplier:
        return 0.0
    from edge_fl.learn.codec import differential_privacy

    config = PrivacyConfig(clip=options.clip, noise_multiplier=options.noise_multiplier, delta=options.delta)
    return differential_privacy.epsilon(differential_privacy.cost(config), options.delta)
