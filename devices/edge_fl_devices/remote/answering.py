"""Answer queries of the operator for lines of the log, or for a diagnostics bundle: checks, versions, recent errors, and public settings.

One query at a time is answered, in a thread of its own, so that a long fit delays no answer. A device answers at most MAX_ANSWERS in
INTERVAL_S, and none where the owner has switched `remote_logs` off; the reply then says why. A bundle leaves out the checks that read the
owner's data or load every package, which takes more memory than a busy board may have; its settings are those of `edge_fl.wire.egress`.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from edge_fl import threads
from edge_fl.blob import describe
from edge_fl.errors import EdgeFLError
from edge_fl.failures import Failure
from edge_fl.fleet.remote_settings import flat
from edge_fl.wire import messages
from edge_fl.wire.egress import SETTINGS
from edge_fl.wire.messages import (
    MAX_ANSWER_BYTES,
    Diagnostics,
    DoctorCheck,
    LogLevel,
    Query,
    QueryReply,
    decode,
    encode,
)
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet, chunk_packets
from edge_fl_devices.agent.state import AgentState
from edge_fl_devices.board.capabilities import version
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.remote.log_file import LogFile
from edge_fl_devices.storage.slots import Slots

log = logging.getLogger(__name__)

MAX_ANSWERS, INTERVAL_S = 6, 60.0
EXPIRY_S = 60
CHECKS = ("machine", "room", "clock", "network")
IDLE_CHECKS = (*CHECKS, "model")  # the canary loads the extractor, as a fit under way does
PACKAGES = tuple(
    "edge-fl numpy onnxruntime scikit-learn scipy paho-mqtt msgspec safetensors tuf cryptography pillow torch".split()
)
ERRORS: LogLevel = "warning"
ERROR_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class QueryAnswered:
    """The reply to a query, and the content that it describes."""

    reply: QueryReply
    payload: bytes = b""

    def packets(self, topics: Topics, device: str) -> Iterator[Packet]:
        """Yield the reply, then the chunks of its content."""
        yield Packet(topics.up(device, "query"), encode(self.reply), expiry_s=EXPIRY_S)
        chunk_topics = partial(topics.up, device, "query", self.reply.id)
        yield from chunk_packets(chunk_topics, self.payload, expiry_s=EXPIRY_S)


Deliver = Callable[[QueryAnswered], None]
AnswerQuery = Callable[[bytes, AgentState, Deliver], None]
"""Answers an encoded query on the state of the agent by one call of the third argument, or not at all; must not wait.

Raises ProtocolError for bytes that are no query.
"""


def decline(query: bytes, state: AgentState, deliver: Deliver) -> None:
    """Answer no query: a simulated device has no log of its own."""
    deliver(QueryAnswered(QueryReply(decode(query, Query).id, reason=Failure.OFF)))


class Responder:
    """Answers the queries of one device. `receive` is called on one thread."""

    def __init__(self, config: DeviceConfig, file: LogFile, identity: Path | None = None) -> None:
        self._config, self._file, self._identity = config, file, identity
        self._started_s = time.monotonic()
        self._recent: deque[float] = deque(maxlen=2 * MAX_ANSWERS)
        self._busy = threading.Lock()

    def receive(self, payload: bytes, state: AgentState, deliver: Deliver) -> None:
        """Answer in a thread, or decline at once; above twice the limit the device does not even decline."""
        query, now_s = decode(payload, Query), time.monotonic()
        recent = [at for at in self._recent if at > now_s - INTERVAL_S]
        if len(recent) >= 2 * MAX_ANSWERS:
            return
        self._recent.append(now_s)
        reason = None if self._config.remote_logs else Failure.OFF
        reason = reason or (Failure.TOO_OFTEN if len(recent) >= MAX_ANSWERS else None)
        reason = reason or (Failure.BUDGET if state.over_budget else None)
        if reason or not self._busy.acquire(blocking=False):
            deliver(QueryAnswered(QueryReply(query.id, reason=reason or Failure.BUSY)))
            return
        try:
            threads.once(partial(self._answer, query, state, deliver), "edge-fl-query").start()
        except RuntimeError as error:  # no more threads available
            self._busy.release()
            log.warning("query for %s: %s", query.what, error)
            deliver(QueryAnswered(QueryReply(query.id, reason=Failure.ERROR)))

    def _answer(self, query: Query, state: AgentState, deliver: Deliver) -> None:
        answered = QueryAnswered(QueryReply(query.id, reason=Failure.ERROR))
        try:
            answered = self._answered(query, state)
        except (EdgeFLError, OSError) as error:
            log.warning("query for %s: %s", query.what, error)
        except Exception:
            log.exception("query for %s failed", query.what)
        finally:
            self._busy.release()  # first: who has the answer may ask again
        deliver(answered)

    def _answered(self, query: Query, state: AgentState) -> QueryAnswered:
        answer: messages.Logs | messages.Diagnostics
        if query.what == "logs":
            answer = self._file.matching(query)
        else:
            answer = collect(self._config, state, self._file, time.monotonic() - self._started_s)
        payload = msgspec.json.encode(answer)
        if len(payload) > MAX_ANSWER_BYTES:
            raise EdgeFLError(f"{len(payload)} bytes, at most {MAX_ANSWER_BYTES}", "not sent")
        blob = describe(payload)
        if not self._identity:
            return QueryAnswered(QueryReply(query.id, blob), payload)
        from edge_fl.secure.signatures import Signer

        own = Signer.of(self._identity)
        content = messages.answer_content(state.topics.fleet, state.device, query.id, blob.sha256)
        return QueryAnswered(QueryReply(query.id, blob, own.certificate, own.sign(content)), payload)


def collect(config: DeviceConfig, state: AgentState, file: LogFile, running_s: float) -> Diagnostics:
    """Collect everything; takes seconds, because the checks start child processes."""
    from edge_fl_devices.doctor import run_checks  # here: what it loads is for those that are asked

    checks = run_checks(config, only=CHECKS if state.work else IDLE_CHECKS)
    values = flat(msgspec.to_builtins(config))
    blocked = Slots(Path(config.folder) / "release").blocked
    return Diagnostics(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=state.status,
        activity=state.activity,
        release=state.release,
        why=state.reason,
        capability=state.capability,
        versions=versions(),
        settings={name: values[name] for name in SETTINGS if name in values},
        checks=[
            msgspec.convert({key: text[:200] for key, text in asdict(check).items()}, DoctorCheck)
            for check in checks
        ],
        errors=file.matching(Query("errors", "logs", ERRORS, max_bytes=ERROR_BYTES)).lines,
        blocked={str(release): why[:200] for release, why in blocked.items()},
        uptime_s=_uptime_s(),
        running_s=round(running_s, 1),
    )


def versions() -> dict[str, str]:
    """Versions of the system, Python and the installed packages."""
    found = {"system": platform.platform()[:200], "python": platform.python_version()}
    for package in PACKAGES:
        if installed := version(package):
            found[package] = installed
    return found


def _uptime_s() -> float:
    with suppress(OSError, ValueError, IndexError):
        return float(Path("/proc/uptime").read_text().split()[0])
    return 0.0
