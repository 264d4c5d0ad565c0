"""Secure sums over the devices that are online: send each stage, wait for the replies, go on when all have arrived or time is up.

Of more than `group` devices those that have something to add are asked first, by an opening that goes no further and costs a device
nothing; they are then drawn into groups, each with a sum of its own, one after the other. A group that fails loses its own sum.

A device that leaves, or that has not replied by the deadline of a stage, has dropped out. Nothing is requested from fewer devices than the
minimum, and nothing is known of a sum that does not complete.

Every step is signed for its device. The registry remembers the number of the signature that opened the last sum for which a vector of a
device arrived, and every opening repeats it: a device whose folder was restored from a backup learns that it has sent more than it knows.
"""

import logging
import queue
import secrets
import time
from collections.abc import Collection, Iterator
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
GROUP = 40
"""Devices in a sum of a larger fleet, at most about. The server's time for n devices grows with n^3: 0.8 s for 40, 12 s for 100, so
that 1,000 devices take 20 s in groups of 40, and 120 s in groups of 100. A sum of 40 hides each device among 39 others, of which 13 may
drop out; smaller groups hide less, and fail more often.
"""


@dataclass(frozen=True)
class SumOptions:
    """How to compute secure sums.

    `minimum` devices, 3 or more, take part, or nothing is sent. Groups have about `group` devices at most. A sum needs `threshold` of its
    cohort.
    Without `masked` the server sees every vector; for fleets without certificates. With `noise_multiplier` each vector is clipped to the
    norm `clip`, and the sum satisfies differential privacy with `delta`.
    """

    minimum: int = 5
    threshold: float = 2 / 3
    stage_s: float = 60.0
    lost_s: float = 5.0
    group: int = GROUP
    masked: bool = True
    clip: float = 0.0
    noise_multiplier: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.noise_multiplier and not self.clip:
            raise ConfigError(
                "secure sum: noise_multiplier without clip; expected the largest norm of a vector"
            )

    def request(
        self, subject: str, release: int, length: int, extractor: str = "", trained: str = ""
    ) -> SumRequest:
        """The request with these options. Raises ConfigError for one that is out of range."""
        given: dict[str, object] = {"subject": subject, "release": release, "length": length}
        given |= {"extractor": extractor, "trained": trained}
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

        Of more than MAX_SUM_DEVICES as many are drawn. Raises SecureSumError if too few take part or remain, ConfigError for invalid
        options.
        """
        invited = self._invited(options, devices)
        cohort = secrets.SystemRandom().sample(invited, min(len(invited), MAX_SUM_DEVICES))
        return self._sum(options.request(subject, release, length), options, cohort)

    def collect_groups(
        self,
        subject: str,
        release: int,
        length: int,
        options: SumOptions = SumOptions(),
        *,
        extractor: str = "",
        trained: str = "",
    ) -> Iterator[Sum | SecureSumError]:
        """The sums of all devices online that have something to add, in groups that are drawn at random; of a group that failed the error.

        extractor, trained: as of `SumRequest`. Raises SecureSumError if too few devices are online or have something to add, ConfigError
        for invalid options.
        """
        request = options.request(subject, release, length, extractor, trained)
        willing = self._invited(options, None)
        if len(willing) > options.group:
            willing = self._willing(request, options, willing)
        for cohort in groups_of(willing, options.minimum, options.group):
            try:
                yield self._sum(request, options, cohort)
            except SecureSumError as error:
                yield error

    def _willing(self, request: SumRequest, options: SumOptions, invited: Collection[str]) -> list[str]:
        """The devices that have something to add. Raises SecureSumError below the minimum."""
        opened = self._opening(request, invited)
        try:
            for device, step in opened.open().items():
                self._send(device, step, options)
            self._receive(opened, options)
        finally:
            del self._replies[opened.id]
        opened.require_minimum()
        return sorted(opened.taking_part)

    def _sum(self, request: SumRequest, options: SumOptions, cohort: Collection[str]) -> Sum:
        opened = self._opening(request, cohort)
        try:
            self._run(opened, options)
        finally:
            del self._replies[opened.id]
            for device, step in opened.settled().items():
                self._send(device, step, options)
        assert opened.result is not None
        return replace(opened.result, epsilon=_epsilon(options))

    def _opening(self, request: SumRequest, invited: Collection[str]) -> SumServer:
        """A new sum, whose replies are kept from now on."""
        id = f"{request.subject}-{request.release}-{secrets.token_hex(8)}"
        journal = self._server.journal
        last = registered_devices.last_sums(journal.db, journal.fleet)
        fleet = self._connection.topics.fleet
        opened = SumServer(fleet, id, request, invited, self._authorities, last=last)
        self._replies[id] = SimpleQueue()
        return opened

    def _invited(self, options: SumOptions, devices: Collection[str] | None) -> list[str]:
        """Devices that are online. Raises SecureSumError below the minimum."""
        roster = self._server.roster
        online = {*roster.head_devices(), *roster.full_devices()}
        invited = sorted(online if devices is None else online & set(devices))
        if len(invited) < options.minimum:
            raise SecureSumError(
                f"{len(invited)} devices are online, {options.minimum} needed",
                Failure.TOO_FEW,
                "nothing was requested",
            )
        return invited

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


def groups_of(devices: Collection[str], minimum: int, group: int = GROUP) -> list[list[str]]:
    """Draw devices into groups of about `group` at most, of at least `minimum` and at most MAX_SUM_DEVICES, and of nearly equal sizes.

    With a minimum above half of MAX_SUM_DEVICES some devices may be in none; they can be in a later sum.
    """
    drawn = secrets.SystemRandom().sample(sorted(devices), len(devices))
    count = max(1, min(-(-len(drawn) // max(group, minimum)), len(drawn) // minimum))
    return [drawn[start::count][:MAX_SUM_DEVICES] for start in range(count)]


def _epsilon(options: SumOptions) -> float:
    """The epsilon of a device's vector in one sum, if all devices of the threshold add their noise; 0 without noise."""
    if not options.noise_multiplier:
        return 0.0
    from edge_fl.learn.codec import differential_privacy

    config = PrivacyConfig(clip=options.clip, noise_multiplier=options.noise_multiplier, delta=options.delta)
    return differential_privacy.epsilon(differential_privacy.cost(config), options.delta)
