"""Devices as clients of the round loop: send a round request to a cohort over MQTT, collect updates until the deadline, close the request.

Devices use the same functions and seeds as `SequentialClients`, so results are bit-identical to a simulation. A request ends when every
member has responded, when the others have left for longer than `lost_s`, or at its deadline; members without a response are missing. With
`max_staleness` the requests of earlier rounds stay open, and late updates on them join the current round.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from statistics import median

from edge_fl.config import MethodSpec
from edge_fl.failures import Failure
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import to_device
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.wire.messages import Mode, Report, Request, Round, spec_digest
from edge_fl_server.mqtt.chunks import SharedBlobs
from edge_fl_server.mqtt.connection import ReceivedMessage
from edge_fl_server.mqtt.devices.roster import RosterDevice
from edge_fl_server.mqtt.session import Server
from edge_fl_server.mqtt.updates.inbox import Response, RoundRequest
from edge_fl_server.mqtt.updates.validation import (
    UpdateTerms,
    Validator,
    counter_range,
    norm,
)
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry.tables import RequestState
from edge_fl_server.training.clients import MEASURES, ClientId, Clients, Downs, Step

log = logging.getLogger(__name__)

POLL_S = 0.25
MIN_COMPARING_S = 10.0
LOST_S = 5.0  # how long to wait for a member that has left, in case it returns
MAX_DEADLINE_S = 86400.0  # largest value of a message


@dataclass(frozen=True)
class OpenRequest:
    """A round request while responses to it count: its broadcasts, and the members that have not responded.

    An update weighs as at most `max_samples` samples (0: no limit).
    """

    request: RoundRequest
    broadcasts: SharedBlobs
    downs: Downs
    deadline_s: float
    max_samples: int
    waiting: set[ClientId]


class DeviceClients(Clients):
    """Full devices behind a broker, asked as a recipe says. `on_report` receives every report that counts.

    The tensors of updates are moved to the torch device `torch_device`.
    """

    may_drop_out = True

    def __init__(
        self,
        server: Server,
        run_id: str,
        spec: MethodSpec,
        recipe: Recipe,
        on_report: Callable[[ClientId, Report], None] = lambda device, report: None,
        torch_device: str = "cpu",
        lost_s: float = LOST_S,
    ) -> None:
        self._connection, self._roster, self._inbox = server.connection, server.roster, server.inbox
        self._assignments, self._journal = server.assignments, server.journal
        self._run_id, self._spec, self._lost_s = run_id, spec, lost_s
        self._cohort, self._validation = recipe.cohort, recipe.validation
        self._on_report, self._torch_device = on_report, torch_device
        self._attempt = 0
        self._open: dict[str, OpenRequest] = {}  # by id, newest last
        # of all open training requests, if late updates count
        self._responses: SimpleQueue[Response] = SimpleQueue()
        self._late: deque[tuple[OpenRequest, Response]] = deque()  # received between rounds
        self._exhausted: set[ClientId] = set()  # privacy budget exhausted
        self._weights: dict[ClientId, int] = {}  # of the last update
        self._training_s = 0.0  # how long the last training took
        self._roster.on_change(self._on_device_change)
        self._connection.on("req", self._on_request)
        self._connection.on_connected(lambda _: self._republish())

    def ids(self) -> Sequence[ClientId]:
        return self._roster.full_devices()

    def trainable(self) -> Sequence[ClientId]:
        return [device for device in self.ids() if device not in self._exhausted]

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Send the round request at once; the returned iterator collects the updates."""
        self._close_outdated(step, round)
        opened = self._open_request(step, round, method, downs)
        started = time.monotonic()
        wait_s = self._cohort.deadline_s
        if step == "compare":  # a round waits for its panel no longer than for its updates
            wait_s = min(max(self._training_s, MIN_COMPARING_S), wait_s)
        self._announce_round()
        self._journal.add_requests(downs, self._run_id, round, step, opened.request.id)
        for client, parts in downs.items():
            before, down = steps.unpaired(parts) if step == "compare" else ({}, parts)
            self._assignments.assign(
                client,
                step,
                run_id=self._run_id,
                round=round,
                id=opened.request.id,
                down=opened.broadcasts.send(down),
                before=opened.broadcasts.send(before),
                deadline_s=opened.deadline_s,
                spec=spec_digest(self._spec),
            )
        return self._collect(opened, started, started + wait_s)

    def at_work(self) -> Collection[ClientId]:
        """Members of open training requests without a response, and those whose late updates are still to be aggregated."""
        if not self._accepts_late:
            return ()
        waiting = (client for opened in self._open.values() for client in opened.waiting)
        return {*waiting, *(response.device for _, response in self._late)}

    def close(self) -> None:
        """Close all requests, withdraw training assignments, and clear the announced round."""
        self._close_requests(list(self._open.values()))
        self._assignments.withdraw_temporary()
        self._connection.clear_retained(self._connection.topics.round(self._run_id))

    @property
    def _accepts_late(self) -> bool:
        return self._cohort.buffer_size > 0

    def _open_request(self, mode: Mode, round: int, method: Method, downs: Downs) -> OpenRequest:
        """Take responses from now on."""
        self._attempt += 1
        # The boot id tells the requests of a restarted server apart, the attempt those of one round.
        id = f"{self._run_id}-{round}-{self._connection.boot}-{self._attempt}"
        broadcast = next(iter(downs.values()), {})  # the norms of all broadcasts are similar
        norms = {name: norm(part) for name, part in broadcast.items()}
        terms = UpdateTerms(self._spec, norms, self._validation.max_growth, counter_range(broadcast))
        request = RoundRequest(
            id=id,
            run_id=self._run_id,
            round=round,
            mode=mode,
            cohort=frozenset(downs),
            validator=Validator.of(method, mode, terms, self._roster.samples),
        )
        deadline_s = self._cohort.deadline_s
        if self._accepts_late and mode == "train":
            request.responses = self._responses
            deadline_s = min(deadline_s * (1 + self._cohort.max_staleness), MAX_DEADLINE_S)
        opened = OpenRequest(
            request,
            SharedBlobs(self._connection, deadline_s),
            downs,
            deadline_s,
            self._max_samples(downs),
            waiting=set(downs),
        )
        self._open[id] = opened
        self._inbox.open(request, terms)
        return opened

    def _close_outdated(self, mode: Mode, round: int) -> None:
        """Close the requests whose responses no longer count in the next one; responses received so far do."""
        keep_open = self._accepts_late and mode != "personalise"
        oldest = round - self._cohort.max_staleness
        outdated = [
            opened
            for opened in self._open.values()
            if not keep_open or opened.request.mode != "train" or opened.request.round < oldest
        ]
        for opened in outdated:
            self._inbox.close(opened.request)
        while not self._responses.empty():
            response = self._responses.get()
            if request := self._open.get(response.report.id):
                self._late.append((request, response))
        if not keep_open:
            self._late.clear()
        self._close_requests(outdated)

    def _collect(self, opened: OpenRequest, started: float, until: float) -> Iterator[Update]:
        """Yield updates until all members have responded or left, or the deadline; then close the request unless late updates count."""
        request, stays_open = opened.request, opened.request.responses is self._responses
        try:
            while received := self._next_response(request, until):
                origin, response = received
                origin.waiting.discard(response.device)
                if response.counts:
                    self._on_report(response.device, response.report)
                    yield self._update(origin, response, request.round)
                elif response.report.error:  # the inbox has logged a rejection
                    self._note_failure(origin, response)
        except GeneratorExit:  # the caller has enough updates
            if not stays_open:
                self._close_requests([opened], "cancelled", "enough others responded")
            raise
        finally:
            if request.mode == "train":
                self._training_s = time.monotonic() - started
            if not stays_open:
                self._close_requests([opened])
        if opened.waiting and not stays_open:
            missing = ", ".join(sorted(opened.waiting))
            log.warning("%s of round %d: no response from %s", request.mode, request.round, missing)

    def _next_response(self, request: RoundRequest, until: float) -> tuple[OpenRequest, Response] | None:
        """The next response and its request; None when nothing is left to wait for, at the deadline, or after `close`."""
        while request.id in self._open:
            self._connection.check()
            if self._late and request.responses is self._responses:
                return self._late.popleft()
            left_s, waiting = max(until - time.monotonic(), 0.0), self._waiting(request)
            if not waiting:
                return None
            try:
                response = request.responses.get(timeout=min(left_s, POLL_S))
            except queue.Empty:
                gone = all(self._roster.gone_for(device) > self._lost_s for device in waiting)
                if (
                    gone or not left_s
                ):  # checked after the queue: responses may have arrived while the caller was busy
                    return None
                continue
            if origin := self._open.get(response.report.id):  # else a worker's verdict came too late
                return origin, response
        return None

    def _note_failure(self, origin: OpenRequest, response: Response) -> None:
        device, request, error = response.device, origin.request, response.report.error
        if error == Failure.BUDGET_EXHAUSTED:
            self._exhausted.add(device)
        text = "%s, %s of round %d: failed: %s"
        self._journal.lines.write(
            log, logging.WARNING, device, text, device, request.mode, request.round, error
        )

    def _update(self, origin: OpenRequest, response: Response, round: int) -> Update:
        staleness = round - origin.request.round
        samples = self._weight(origin, response)
        return Update(
            response.device,
            samples,
            to_device(response.parts, self._torch_device),
            dict(response.report.metrics),
            start=origin.downs[response.device] if staleness else None,
            staleness=staleness,
        )

    def _weight(self, origin: OpenRequest, response: Response) -> int:
        """The samples that an update counts as: bounded by the cohort's median and by twice the device's previous update."""
        device, claimed = response.device, response.report.samples
        if not origin.max_samples or origin.request.mode in MEASURES:
            return claimed
        samples = min(claimed, origin.max_samples, 2 * self._weights.get(device, claimed))
        if samples < claimed:
            text = "%s: update of %d samples counts as %d (validation.max_weight; at most twice its previous update)"
            self._journal.lines.write(log, logging.WARNING, device, text, device, claimed, samples)
        self._weights[device] = samples
        return samples

    def _max_samples(self, cohort: Collection[ClientId]) -> int:
        """The largest weight of one update: a multiple of the cohort's median of announced samples."""
        announced = [samples for client in cohort if (samples := self._roster.samples(client))]
        return round(self._validation.max_weight * median(announced)) if announced else 0

    def _waiting(self, request: RoundRequest) -> set[ClientId]:
        """Members whose responses go to the queue of `request` and are still missing."""
        opened = (other for other in self._open.values() if other.request.responses is request.responses)
        return {client for other in opened for client in other.waiting}

    def _announce_round(self) -> None:
        """Publish the method spec, and the earliest round for which reports count."""
        opened = list(self._open.values())
        if not opened:
            return
        round = min(one.request.round for one in opened)
        deadline_s = max(one.deadline_s for one in opened)
        message = Round(self._run_id, round, deadline_s, self._spec)
        topic = self._connection.topics.round(self._run_id)
        self._connection.publish(topic, message, retain=True, expiry_s=deadline_s)

    def _close_requests(
        self,
        requests: Sequence[OpenRequest],
        state: RequestState = "timed_out",
        reason: str = Failure.DEADLINE,
    ) -> None:
        """Close open requests: later reports are stale, chunks are cleared, devices still working get a "rest"."""
        for opened in requests:
            request = opened.request
            if self._open.pop(request.id, None) is None:
                continue
            self._inbox.close(request)
            self._journal.settle(request.id, state, reason)
            opened.broadcasts.clear(other.broadcasts for other in self._open.values())
            for device in sorted(request.cohort):
                assignment = self._assignments.current(device)
                if assignment and assignment.id == request.id:
                    rest_id = f"{request.id}-rest"
                    self._assignments.assign(
                        device, "rest", run_id=request.run_id, round=request.round, id=rest_id
                    )

    def _on_device_change(self, before: RosterDevice | None, now: RosterDevice) -> None:
        """Publish the assignment again for a member that restarted during the request."""
        if now.ready and before and before.boot != now.boot and self._request_of(now.id):
            self._assignments.republish(now.id)

    def _on_request(self, received: ReceivedMessage) -> None:
        """Publish missing chunks again."""
        message = received.message
        if not (isinstance(message, Request) and message.kind == "chunks"):
            return
        if opened := self._request_of(received.address.device):
            task = partial(opened.broadcasts.republish, message.sha256, message.missing)
            self._connection.run_in_background(f"chunks {message.sha256}", task)

    def _request_of(self, device: ClientId) -> OpenRequest | None:
        """The open request that a device works on: at most one at a time."""
        return next((opened for opened in list(self._open.values()) if device in opened.waiting), None)

    def _republish(self) -> None:
        self._announce_round()
        for opened in list(self._open.values()):
            opened.broadcasts.republish_all()
