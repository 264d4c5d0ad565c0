"""The fleet of real devices: a round is a question to every member of the cohort over MQTT, and the answers that come back in time.

What `SequentialFleet` does in a loop happens here on the devices, with the same functions and the same seeds, so the results are equal to
the bit. A round ends when every member has answered, when the rest are gone for good, or at its deadline; who has not answered by
then is simply missing.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edge_fl.config import TaskSpec
from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, to_arrays, to_device
from edge_fl.methods.method import Method
from edge_fl.wire import tensors
from edge_fl.wire.blob import Blob, describe
from edge_fl.wire.messages import Mode, Report, Request, Round
from edge_fl.wire.transport import SAFETENSORS
from server.fleets.fleet import ClientId, Downs
from server.registry.records import TaskWord
from server.release.publish import clear_chunks, send_chunks
from server.wire.exchange import Answer, Exchange
from server.wire.inbox import Inbox
from server.wire.judge import Terms, expected_of, flaw_of, length
from server.wire.link import Heard, Link
from server.wire.roster import Device, Roster
from server.wire.wants import Wants

log = logging.getLogger(__name__)

POLL_S = 0.25


@dataclass(frozen=True)
class Limits:
    """`lost_s`: how long a round waits for a member that has left, in case it comes back; `max_growth` as in `JudgeConfig`."""

    deadline_s: float = 120.0
    lost_s: float = 5.0
    max_growth: float = 1000.0


class Broadcasts:
    """What travels down in one exchange: one blob for all clients that receive the same, sent once and kept until the end."""

    def __init__(self, link: Link, expiry_s: float) -> None:
        self._link, self._expiry_s = link, expiry_s
        self._packed: dict[frozenset[tuple[str, str, int]], tuple[Parts, Blob]] = {}
        self._payloads: dict[str, tuple[Blob, bytes]] = {}

    def send(self, parts: Parts) -> Blob | None:
        """The descriptor of `parts`, whose chunks are now retained; None when there is nothing to send."""
        if not parts:
            return None
        # Clients of one round mostly receive the same tensors: pack and hash them once. The parts are kept so that ids stay theirs.
        key = frozenset(
            (part, name, id(t)) for part, params in parts.items() for name, t in [("", None), *params.items()]
        )
        if key not in self._packed:
            payload = tensors.pack(to_arrays(parts))
            blob = describe(payload)
            self._packed[key] = parts, blob
            if blob.sha256 not in self._payloads:
                self._payloads[blob.sha256] = blob, payload
                self.send_again(blob.sha256)
        return self._packed[key][1]

    def send_again(self, sha256: str, only: Sequence[int] | None = None) -> None:
        """Retains the chunks of one blob anew, or `only` these; does nothing for a blob that is not ours."""
        if (known := self._payloads.get(sha256)) and (transport := self._link.transport):
            blob, payload = known
            chunks = None if only is None else [index for index in only if index < len(blob.chunks)]
            send_chunks(
                transport,
                self._link.topics,
                blob,
                payload,
                SAFETENSORS,
                max(1, round(self._expiry_s)),
                only=chunks,
            )

    def send_all_again(self) -> None:
        """Retains everything anew, for a broker that has forgotten it."""
        for sha256 in list(self._payloads):
            self.send_again(sha256)

    def clear(self) -> None:
        """Nothing of it stays retained."""
        for blob, _ in self._payloads.values():
            if transport := self._link.transport:
                clear_chunks(transport, self._link.topics, blob)
        self._payloads, self._packed = {}, {}


@dataclass(frozen=True)
class Question:
    """What is asked now: its answers so far, its broadcasts, and the announcement of its round."""

    exchange: Exchange
    broadcasts: Broadcasts
    round: Round


class MqttFleet:
    """Full devices behind a broker. `heard` sees every report that counts; `close` withdraws whatever is still asked.

    Updates are handed over with their tensors on the torch device `device`.
    """

    def __init__(
        self,
        link: Link,
        roster: Roster,
        inbox: Inbox,
        wants: Wants,
        task: str,
        spec: TaskSpec,
        limits: Limits = Limits(),
        heard: Callable[[ClientId, Report], None] = lambda device, report: None,
        device: str = "cpu",
    ) -> None:
        self._link, self._roster, self._inbox, self._wants, self._device = link, roster, inbox, wants, device
        self._task, self._spec, self._limits, self._heard = task, spec, limits, heard
        self._attempt = 0
        self._question: Question | None = None
        roster.on_change(self._reborn)
        link.on("req", self._asked)
        link.on_return(lambda _: self._say_again())

    def clients(self) -> Sequence[ClientId]:
        return self._roster.full_devices()

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._ask("train", round, method, downs)

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._ask("personalise", round, method, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._ask("evaluate", round, method, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        """Devices keep their own."""
        return iter(())

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        """Devices have kept their own."""

    def close(self) -> None:
        """Withdraws the open question, the wants to train, and the announcement of the round."""
        self._end()
        self._wants.withdraw_passing()
        self._link.forget(self._link.topics.round(self._task))

    def _ask(self, mode: Mode, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Asks at once, so that devices work while whoever asked does something else; the iterator waits for the answers."""
        self._end()
        self._attempt += 1
        deadline_s = self._limits.deadline_s
        # The boot keeps a restarted server from taking an old answer for a new one; the attempt keeps the steps of a round apart.
        id = f"{self._task}-{round}-{self._link.boot}-{self._attempt}"
        expected = expected_of(method, whole=mode == "train")
        some = next(iter(downs), None)  # they are all about as long
        lengths = {name: length(part) for name, part in (downs[some] if some else {}).items()}
        terms = Terms(self._spec, lengths, self._limits.max_growth)
        flaw = flaw_of(method, terms)
        exchange = Exchange(id, self._task, round, mode, list(downs), expected, self._samples, flaw)
        broadcasts = Broadcasts(self._link, deadline_s)
        question = self._question = Question(
            exchange, broadcasts, Round(self._task, round, deadline_s, self._spec)
        )
        until = time.monotonic() + deadline_s
        self._inbox.open(exchange, terms)
        self._announce(question)
        self._inbox.journal.ask(downs, self._task, round, mode, id)
        for client in downs:
            down = broadcasts.send(downs[client])
            self._wants.ask(
                client, mode, task=self._task, round=round, id=id, down=down, deadline_s=deadline_s
            )
        return self._collect(exchange, until)

    def _collect(self, exchange: Exchange, until: float) -> Iterator[Update]:
        waiting = set(exchange.cohort)
        try:
            while waiting and self._is_open(exchange):
                self._link.check()
                left = max(until - time.monotonic(), 0.0)
                try:
                    answer = exchange.answers.get(timeout=min(left, POLL_S))
                except queue.Empty:
                    if not left:  # and nothing more has come while whoever asked did something else
                        break
                    if all(self._roster.gone_for(device) > self._limits.lost_s for device in waiting):
                        break
                    continue
                waiting.remove(answer.device)
                if answer.counts:
                    self._heard(answer.device, answer.report)
                    parts = to_device(answer.parts, self._device)
                    yield Update(answer.device, answer.report.samples, parts, dict(answer.report.metrics))
                else:
                    log.warning(
                        "%s, %s of round %d: %s",
                        answer.device,
                        exchange.mode,
                        exchange.round,
                        _why(answer),
                        extra={"device": answer.device},
                    )
        except GeneratorExit:  # whoever asked has enough
            self._end(exchange, "removed", "enough others answered")
            raise
        finally:
            self._end(exchange)
        if waiting:
            log.warning(
                "%s of round %d: no answer from %s", exchange.mode, exchange.round, ", ".join(sorted(waiting))
            )

    def _announce(self, question: Question) -> None:
        topic = self._link.topics.round(self._task)
        self._link.say(topic, question.round, retain=True, expiry_s=self._limits.deadline_s)

    def _is_open(self, exchange: Exchange) -> bool:
        return self._question is not None and self._question.exchange is exchange

    def _end(
        self, exchange: Exchange | None = None, state: TaskWord = "timed_out", reason: str = "deadline"
    ) -> None:
        """Ends the open question (or only that of `exchange`): late answers are refused, chunks cleared, the cohort put to rest."""
        if self._question is None or (exchange and not self._is_open(exchange)):
            return
        question, self._question = self._question, None
        asked = question.exchange
        self._inbox.close(asked)
        self._inbox.journal.settle(asked.id, state, reason)
        question.broadcasts.clear()
        for device in sorted(asked.cohort):
            self._wants.ask(device, "rest", task=asked.task, round=asked.round, id=f"{asked.id}-rest")

    def _samples(self, device: ClientId) -> int:
        known = self._roster.get(device)
        return known.capability.samples if known and known.capability else 0

    def _reborn(self, before: Device | None, now: Device) -> None:
        """A member that started anew in mid-round is told again what is wanted."""
        question = self._question
        if (
            question
            and now.ready
            and before
            and before.boot != now.boot
            and now.id in question.exchange.cohort
        ):
            self._wants.again(now.id)

    def _asked(self, heard: Heard) -> None:
        request, question = heard.message, self._question
        if not (question and isinstance(request, Request) and request.ask == "chunks"):
            return
        if heard.address.device in question.exchange.cohort:
            again = partial(question.broadcasts.send_again, request.sha256, request.missing)
            self._link.aside(f"chunks {request.sha256}", again)

    def _say_again(self) -> None:
        if question := self._question:
            self._announce(question)
            question.broadcasts.send_all_again()


def _why(answer: Answer) -> str:
    return answer.refusal or f"gave up, {answer.report.error}"
