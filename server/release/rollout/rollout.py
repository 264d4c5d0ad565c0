"""From a round's model to the heads that serve it: export, publish, tell head-only devices stage by stage, note what they report.

A head-only device is told of the release that it is to serve as soon as it is ready, also one that comes late or returns: of the new one
once its stage's turn has come (`server.release.rollout.stages`), of the one before until then, and again when the roll-out is aborted. That one is
then published once more, under a higher version. A release is not overtaken: before the next, devices that are there may finish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from edge_fl.capability import Tier
from edge_fl.config import MethodSpec, RolloutConfig
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.errors import EdgeFLError
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifest import Manifest
from edge_fl.wire.messages import Report, Request
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.devices.assignments import Assignments
from server.mqtt.devices.roster import Device, Roster
from server.mqtt.updates.head_updates import HeadUpdates
from server.mqtt.updates.inbox import Inbox
from server.mqtt.updates.round_request import Verdict
from server.registry import Database
from server.release import export
from server.release.export import Quantiser
from server.release.publish import Publisher
from server.release.repository import Repository
from server.release.rollout.gates import outcome_of
from server.release.rollout.staged import StagedRollout, assignment_id
from server.release.rollout.stages import Stages

log = logging.getLogger(__name__)

POLL_S = 0.5
LOOK_S = 0.02
CLOSE_S = 5.0


class Rollout:
    """The releases of one fleet. `heard` sees every report of a head that counts. Made after the link is open, closed before it is.

    A thread of its own looks every now and then how a staged roll-out goes and what people want of it.
    """

    def __init__(
        self,
        connection: ServerConnection,
        roster: Roster,
        inbox: Inbox,
        assignments: Assignments,
        repository: Repository,
        heard: Callable[[str, Report], None] = lambda device, report: None,
        torch_device: str = "cpu",
        *,
        plan: RolloutConfig = RolloutConfig(),
        db: Database | None = None,
        resume: bool = False,
        quantiser: Quantiser | None = None,
        watch: Watch = unwatched,
    ) -> None:
        assert connection.transport is not None
        self._connection, self._roster, self._assignments, self._repository = (
            connection,
            roster,
            assignments,
            repository,
        )
        self._heard, self._plan, self._quantiser, self._told = heard, plan, quantiser, watch
        self._publisher = Publisher(connection.transport, connection.topics, repository, watch=watch)
        self._known = {manifest.release: manifest for manifest in repository.releases()}
        self._staged = StagedRollout(db or Database.open(), connection.topics.fleet, resume=resume)
        # devices, and ids of wants
        self._reported = {(device, self._staged.assignment) for device in self._staged.answered}
        self._change = threading.Condition()
        self._publishing = threading.Lock()
        self._reassert()
        self.head_updates = HeadUpdates(roster, self._count, torch_device)
        inbox.on_head(self._take, self.head_updates)
        connection.on("req", self._asked)
        connection.on_return(lambda forgotten: self._reassert(chunks=forgotten))
        roster.on_change(self._offer)
        self._closed, self._news = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="edge-fl-rollout", daemon=True)
        self._watcher.start()

    @property
    def current(self) -> Manifest | None:
        """The release that heads are to serve now, or soon."""
        stages = self._staged.stages
        if stages is None:
            return None
        given_up = stages.state in ("aborted", "rolled_back")
        return self._known.get(self._staged.previous if given_up else stages.release)

    @property
    def stages(self) -> Stages | None:
        """Where the roll-out stands."""
        return self._staged.stages

    def close(self) -> None:
        """Looks no longer."""
        self._closed.set()
        self._news.set()
        self._watcher.join(CLOSE_S)

    def release(
        self,
        method: Method,
        shared: Parts,
        spec: MethodSpec,
        *,
        run_id: str,
        round: int,
        collect: bool = False,
    ) -> Manifest:
        """Exports, publishes and offers one release; with `collect`, devices may send back what the method can use.

        Raises ArtefactError when the export misses parity, MethodError without one.
        """
        number = self._repository.next_release()
        manifest, payloads = export.release(
            method,
            shared,
            spec,
            number=number,
            run_id=run_id,
            round=round,
            collect=collect,
            quantiser=self._quantiser,
        )
        self.head_updates.open(assignment_id(number), manifest, method)
        self.roll_out(manifest, payloads)
        return manifest

    def roll_out(self, manifest: Manifest, payloads: Mapping[str, bytes]) -> None:
        """Publishes a release and begins to offer it. Raises ArtefactError when `payloads` are not its own."""
        with self._publishing:
            self._publisher.publish(manifest, payloads)
        with self._change:
            self._known[manifest.release] = manifest
            self._staged.begin(manifest.release, self._plan, len(self._roster.head_devices()))
        self._offer_all()

    def wait(self, heads: int, deadline_s: float) -> list[str]:
        """Waits until `heads` devices (0: all head-only devices that are there) reported, stage after stage -> those that did not."""
        until = time.monotonic() + deadline_s
        with self._change:
            while self._staged.moving or (self._heads < heads if heads else self.missing()):
                self._told(Count("heads", self._heads, heads or self._heads + len(self.missing())))
                self._connection.check()
                if (left := until - time.monotonic()) <= 0:
                    break
                self._change.wait(min(left, POLL_S))
                # thousands of heads report at once: count them once
                self._change.wait_for(lambda: False, LOOK_S)
            self._told(Count("heads", self._heads, self._heads))
        return self.missing()

    def rest(self, deadline_s: float) -> bool:
        """Waits until a staged roll-out is over, or paused; whether it is."""
        until = time.monotonic() + deadline_s
        with self._change:
            while self._staged.moving and (left := until - time.monotonic()) > 0:
                self._connection.check()
                self._change.wait(min(left, POLL_S))
        return not self._staged.moving

    def missing(self) -> list[str]:
        """Head-only devices that are there, are to serve the current release now, and have not reported on it."""
        stages = self._staged.stages
        if stages is None:
            return []
        due = [id for id in self._roster.head_devices() if stages.admits(id) or stages.returns(id)]
        return [id for id in due if (id, self._wanted(id)[1]) not in self._reported]

    @property
    def _heads(self) -> int:
        return sum(id == self._wanted(device)[1] for device, id in self._reported)

    def _offer(self, before: Device | None, now: Device) -> None:
        if not now.ready or now.tier is not Tier.HEAD:
            return
        manifest, id = self._wanted(now.id)
        assignment = self._assignments.current(now.id)
        if manifest and (assignment is None or assignment.id != id):
            self._assignments.ask(
                now.id, "serve", run_id=manifest.run_id, round=manifest.round, id=id, release=manifest.release
            )

    def _offer_all(self) -> None:
        for device in self._roster.table.values():
            self._offer(None, device)

    def _wanted(self, device: str) -> tuple[Manifest | None, str]:
        """The release that a device is to serve now, and the id of that want: coming back from a bad one has one of its own."""
        stages, previous = self._staged.stages, self._staged.previous
        if stages is None:
            return None, ""
        if stages.admits(device):
            return self._known.get(stages.release), self._staged.assignment
        id = self._staged.way_back if stages.returns(device) else assignment_id(previous)
        return self._known.get(previous), id

    def _watch(self) -> None:
        """Until closed: how does the roll-out go, and what is wanted of it?"""
        while not self._closed.is_set():
            self._news.wait(POLL_S)
            self._news.clear()
            try:
                self._look()
            except EdgeFLError as error:
                log.warning("roll-out: %s; looked at again in %g s", error, POLL_S)
            except Exception:
                log.exception("roll-out: looked at again in %g s", POLL_S)

    def _look(self) -> None:
        if not self._staged.advance(self._roster.head_devices()):
            return
        stages = self._staged.stages
        if stages and stages.state in ("aborted", "rolled_back"):
            self._go_back(stages)
        elif stages and stages.release not in self._last_published():
            with self._publishing:
                self._publisher.republish(stages.release)
        with self._change:
            self._known |= {manifest.release: manifest for manifest in self._repository.releases()}
        self._offer_all()
        with self._change:
            self._change.notify_all()

    def _go_back(self, stages: Stages) -> None:
        """Publishes the release before once more, so that its metadata are newer than those of the bad one."""
        log.warning("release %d: %s (%s)", stages.release, stages.state, stages.reason)
        if self._staged.previous in self._known:
            with self._publishing:
                self._publisher.republish(self._staged.previous)
        else:
            log.warning(
                "release %d: there is none to go back to; devices keep what they have", stages.release
            )

    def _last_published(self) -> list[int]:
        return [manifest.release for manifest in self._repository.releases()[-1:]]

    def _take(self, device: str, report: Report) -> Verdict | None:
        """The answer to a report of a head; None while parts that come with it are on their way."""
        manifest = self._known.get(report.release)
        if manifest is None:
            return Verdict(report.id, "rejected", "unknown_release")
        if not report.error and report.extractor not in manifest.extractors:
            return Verdict(report.id, "rejected", "extractor")
        if report.blob and not report.error:
            return self.head_updates.take_report(device, report)
        self._count(device, report)
        return Verdict(report.id, "accepted")

    def _count(self, device: str, report: Report) -> None:
        self._heard(device, report)
        if report.error:
            log.warning("%s: release %d: %s", device, report.release, report.error, extra={"device": device})
        with self._change:
            self._staged.note(device, report.id, outcome_of(report.error, report.metrics))
            self._reported.add((device, report.id))
            self._change.notify_all()
        self._news.set()

    def _asked(self, heard: Heard) -> None:
        """A device misses metadata, or chunks of a release, that the broker should have."""
        request = heard.message
        if isinstance(request, Request) and request.kind == "metadata":
            self._connection.aside("metadata", lambda: self._reassert(chunks=False))
        elif isinstance(request, Request) and request.kind == "chunks":
            self._connection.aside(f"repair {request.sha256}", lambda: self._repair(request))

    def _repair(self, request: Request) -> None:
        with self._publishing:
            self._publisher.repair(request.sha256, request.missing)

    def _reassert(self, *, chunks: bool = True) -> None:
        with self._publishing:
            if self._known:
                self._publisher.reassert(chunks=chunks)
