"""The fleet of real devices: a round is a question to every member of the cohort over MQTT, and the answers that come back in time.

What `SequentialFleet` does in a loop happens here on the devices, with the same functions and the same seeds, so the results are equal to
the bit. A round ends when every member has answered, when the rest are gone for good, or at its deadline; who has not answered by
then is simply missing. Where late updates count, the members of earlier rounds stay at work, and what they send joins the round that is on.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from edge_fl.config import MethodSpec
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import to_device
from edge_fl.methods.contract.method import Method
from edge_fl.wire.messages import BUDGET_EXHAUSTED, Mode, Report, Request, Round
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.devices.assignments import Assignments
from server.mqtt.devices.roster import Device, Roster
from server.mqtt.updates.inbox import Inbox
from server.mqtt.updates.round_request import Answer, RoundRequest
from server.mqtt.updates.shared_blobs import SharedBlobs
from server.mqtt.updates.validation import Terms, expected_of, flaw_of, length
from server.registry.records import RequestState
from server.training.fleet import ClientId, Downs, Fleet, Step

log = logging.getLogger(__name__)

POLL_S = 0.25
MAX_DEADLINE_S = 86400.0  # that a message may name


@dataclass(frozen=True)
class Limits:
    """`lost_s`: how long a round waits for a member that has left, in case it comes back; `max_growth` as in `JudgeConfig`.

    `max_staleness`: for how many rounds after its own an update still counts. None: for none, and whoever is late is told to rest.
    """

    deadline_s: float = 120.0
    lost_s: float = 5.0
    max_growth: float = 1000.0
    max_staleness: int | None = None


@dataclass(frozen=True)
class OpenRequest:
    """What a cohort was asked, while answers to it count: what was sent to whom, and who has not been heard yet."""

    round_request: RoundRequest
    broadcasts: SharedBlobs
    downs: Downs
    deadline_s: float
    waiting: set[ClientId]


class MqttFleet(Fleet):
    """Full devices behind a broker. `heard` sees every report that counts; `close` withdraws whatever is still asked.

    Updates are handed over with their tensors on the torch device `device`.
    """

    may_drop_out = True

    def __init__(
        self,
        connection: ServerConnection,
        roster: Roster,
        inbox: Inbox,
        assignments: Assignments,
        run_id: str,
        spec: MethodSpec,
        limits: Limits = Limits(),
        heard: Callable[[ClientId, Report], None] = lambda device, report: None,
        device: str = "cpu",
    ) -> None:
        self._connection, self._roster, self._inbox, self._assignments, self._device = (
            connection,
            roster,
            inbox,
            assignments,
            device,
        )
        self._run_id, self._spec, self._limits, self._heard = run_id, spec, limits, heard
        self._attempt = 0
        self._open: dict[str, OpenRequest] = {}  # open ones by id, the newest last
        self._answers: SimpleQueue[Answer] = SimpleQueue()  # to all rounds of training that are open
        self._come: deque[tuple[OpenRequest, Answer]] = deque()  # between rounds
        self._spent: set[ClientId] = set()
        roster.on_change(self._reborn)
        connection.on("req", self._asked)
        connection.on_return(lambda _: self._say_again())

    def clients(self) -> Sequence[ClientId]:
        return self._roster.full_devices()

    def trainable(self) -> Sequence[ClientId]:
        return [device for device in self.clients() if device not in self._spent]

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Asks at once, so that devices work while whoever asked does something else; the iterator waits for the answers."""
        self._leave_behind(step, round)
        opened = self._ask(step, round, method, downs)
        round_request, limit_s = opened.round_request, opened.deadline_s
        until = time.monotonic() + self._limits.deadline_s
        self._announce()
        self._inbox.journal.ask(downs, self._run_id, round, step, round_request.id)
        for client in downs:
            down = opened.broadcasts.send(downs[client])
            place = {"run_id": self._run_id, "round": round, "id": round_request.id}
            self._assignments.ask(client, step, **place, down=down, deadline_s=limit_s)
        return self._collect(opened, until)

    def at_work(self) -> Collection[ClientId]:
        """Members of rounds that are not over for them, and those whose answers have not been looked at."""
        if not self._late:
            return ()
        waiting = (client for opened in self._open.values() for client in opened.waiting)
        return {*waiting, *(answer.device for _, answer in self._come)}

    def close(self) -> None:
        """Withdraws what is still asked, the wants to train, and the announcement of the round."""
        self._end(list(self._open.values()))
        self._assignments.withdraw_passing()
        self._connection.forget(self._connection.topics.round(self._run_id))

    @property
    def _late(self) -> bool:
        """Whether late updates count."""
        return self._limits.max_staleness is not None

    def _ask(self, mode: Mode, round: int, method: Method, downs: Downs) -> OpenRequest:
        """An exchange whose answers are taken from now on."""
        self._attempt += 1
        # The boot keeps a restarted server from taking an old answer for a new one; the attempt keeps the steps of a round apart.
        id = f"{self._run_id}-{round}-{self._connection.boot}-{self._attempt}"
        expected = expected_of(method, whole=mode == "train")
        some = next(iter(downs), None)  # they are all about as long
        lengths = {name: length(part) for name, part in (downs[some] if some else {}).items()}
        terms = Terms(self._spec, lengths, self._limits.max_growth)
        flaw, cohort, limit_s = flaw_of(method, terms), list(downs), self._limits.deadline_s
        answers: SimpleQueue[Answer] = SimpleQueue()
        if self._late and mode == "train":
            answers = self._answers
            limit_s = min(limit_s * (1 + (self._limits.max_staleness or 0)), MAX_DEADLINE_S)
        round_request = RoundRequest(
            id, self._run_id, round, mode, cohort, expected, self._samples, flaw, answers
        )
        opened = OpenRequest(
            round_request, SharedBlobs(self._connection, limit_s), downs, limit_s, set(cohort)
        )
        self._open[id] = opened
        self._inbox.open(round_request, terms)
        return opened

    def _leave_behind(self, mode: Mode, round: int) -> None:
        """Ends the exchanges whose answers count no longer once the next is asked; what has come by then does."""
        most = self._limits.max_staleness
        keep = most is not None and mode != "personalise"
        oldest = round - (most or 0)
        over = [
            opened
            for opened in self._open.values()
            if not keep or opened.round_request.mode != "train" or opened.round_request.round < oldest
        ]
        for opened in over:
            self._inbox.close(opened.round_request)
        while not self._answers.empty():
            answer = self._answers.get()
            if asked := self._open.get(answer.report.id):
                self._come.append((asked, answer))
        if not keep:
            self._come.clear()
        self._end(over)

    def _collect(self, opened: OpenRequest, until: float) -> Iterator[Update]:
        round_request, late = opened.round_request, opened.round_request.answers is self._answers
        try:
            while come := self._next(round_request, until):
                asked, answer = come
                asked.waiting.discard(answer.device)
                if answer.counts:
                    self._heard(answer.device, answer.report)
                    yield self._update(asked, answer, round_request.round)
                else:
                    if answer.report.error == BUDGET_EXHAUSTED:
                        self._spent.add(answer.device)
                    place = f"{answer.device}, {round_request.mode} of round {asked.round_request.round}"
                    log.warning("%s: %s", place, _why(answer), extra={"device": answer.device})
        except GeneratorExit:  # whoever asked has enough
            if not late:
                self._end([opened], "removed", "enough others answered")
            raise
        finally:
            if not late:
                self._end([opened])
        if (waiting := opened.waiting) and not late:
            log.warning(
                "%s of round %d: no answer from %s",
                round_request.mode,
                round_request.round,
                ", ".join(sorted(waiting)),
            )

    def _next(self, round_request: RoundRequest, until: float) -> tuple[OpenRequest, Answer] | None:
        """The next answer where those to `exchange` come; None once nobody is left to wait for, at the deadline, or when it was ended."""
        while round_request.id in self._open:
            self._connection.check()
            if self._come and round_request.answers is self._answers:
                return self._come.popleft()
            left, waiting = max(until - time.monotonic(), 0.0), self._waiting(round_request)
            if not waiting:
                return None
            try:
                answer = round_request.answers.get(timeout=min(left, POLL_S))
            except queue.Empty:
                gone = all(self._roster.gone_for(device) > self._limits.lost_s for device in waiting)
                if gone or not left:  # and nothing more has come while whoever asked did something else
                    return None
                continue
            if asked := self._open.get(answer.report.id):  # else a worker was too late with its verdict
                return asked, answer
        return None

    def _update(self, asked: OpenRequest, answer: Answer, round: int) -> Update:
        staleness = round - asked.round_request.round
        return Update(
            answer.device,
            answer.report.samples,
            to_device(answer.parts, self._device),
            dict(answer.report.metrics),
            start=asked.downs[answer.device] if staleness else None,
            staleness=staleness,
        )

    def _waiting(self, round_request: RoundRequest) -> set[ClientId]:
        """Who may still answer where these answers come."""
        asked = (q for q in self._open.values() if q.round_request.answers is round_request.answers)
        return {client for opened in asked for client in opened.waiting}

    def _announce(self) -> None:
        """The spec of the task, and the first round whose answers count."""
        asked = list(self._open.values())
        if not asked:
            return
        round = min(opened.round_request.round for opened in asked)
        limit_s = max(opened.deadline_s for opened in asked)
        announced = Round(self._run_id, round, limit_s, self._spec)
        self._connection.say(
            self._connection.topics.round(self._run_id), announced, retain=True, expiry_s=limit_s
        )

    def _end(
        self,
        round_requests: Sequence[OpenRequest],
        state: RequestState = "timed_out",
        reason: str = "deadline",
    ) -> None:
        """Ends these, where they are open: answers are refused as late, chunks cleared, and whoever is at it is put to rest."""
        for opened in round_requests:
            asked = opened.round_request
            if self._open.pop(asked.id, None) is None:
                continue
            self._inbox.close(asked)
            self._inbox.journal.settle(asked.id, state, reason)
            opened.broadcasts.clear(other.broadcasts for other in self._open.values())
            for device in sorted(asked.cohort):
                assignment = self._assignments.current(device)
                if assignment and assignment.id == asked.id:
                    rest = f"{asked.id}-rest"
                    self._assignments.ask(device, "rest", run_id=asked.run_id, round=asked.round, id=rest)

    def _samples(self, device: ClientId) -> int:
        known = self._roster.get(device)
        return known.capability.samples if known and known.capability else 0

    def _reborn(self, before: Device | None, now: Device) -> None:
        """A member that started anew in mid-round is told again what is wanted."""
        if now.ready and before and before.boot != now.boot and self._asked_of(now.id):
            self._assignments.again(now.id)

    def _asked(self, heard: Heard) -> None:
        request = heard.message
        if not (isinstance(request, Request) and request.kind == "chunks"):
            return
        if opened := self._asked_of(heard.address.device):
            again = partial(opened.broadcasts.send_again, request.sha256, request.missing)
            self._connection.aside(f"chunks {request.sha256}", again)

    def _asked_of(self, device: ClientId) -> OpenRequest | None:
        """What a device that has not been heard yet is at; it is asked one thing at a time."""
        return next((q for q in list(self._open.values()) if device in q.waiting), None)

    def _say_again(self) -> None:
        self._announce()
        for opened in list(self._open.values()):
            opened.broadcasts.send_all_again()


def _why(answer: Answer) -> str:
    return answer.refusal or f"gave up, {answer.report.error}"
