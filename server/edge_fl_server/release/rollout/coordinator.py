"""Roll-out of releases by a running server: export, publish, assign to devices stage by stage, collect their reports.

A ready head-only device is assigned the new release once its stage has started (`stages`), before that the previous release, and the
previous one again after an abort; the previous release is then published once more, with a higher metadata version. Before the next
release, present devices may finish with the current one.

Releases of the agent's software have the same stages and gates, with devices' update status as outcome: the retained message `dn/agent`
asks a device for the new agent. After an abort the release is signed as withdrawn, and its devices are asked for the one before. Devices
whose owner declines updates take no part.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from edge_fl import threads
from edge_fl.blob import describe
from edge_fl.config import MethodSpec
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.failures import UNLABELLED, Failure
from edge_fl.fields import Tier
from edge_fl.heads.plan import Serves, Way
from edge_fl.learn.tree import Parts
from edge_fl.logs import Outage
from edge_fl.methods.contract.method import Method
from edge_fl.release.agent import AgentUpdate, UpdateStatus
from edge_fl.release.manifests import Manifest, blobs, extends
from edge_fl.wire.egress import HEAD_NUMBERS
from edge_fl.wire.messages import Report, Request
from edge_fl_server.mqtt.connection import ReceivedMessage
from edge_fl_server.mqtt.devices.roster import RosterDevice
from edge_fl_server.mqtt.session import Server
from edge_fl_server.mqtt.updates.inbox import HeadUpdates, UpdateVerdict
from edge_fl_server.mqtt.updates.validation import RejectedError, require_numbers
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import rollouts
from edge_fl_server.release import agent_releases, export
from edge_fl_server.release.export import Quantiser, ReleaseOrigin
from edge_fl_server.release.fleet_head import FleetExtra
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.gates import Outcome, outcome_of
from edge_fl_server.release.rollout.stages import Stages, unproven_releases
from edge_fl_server.release.rollout.stored_rollout import StoredRollout, assignment_id

log = logging.getLogger(__name__)

CLOSED = ("done", "failed")
WITHDRAWN = ("aborted", "rolled_back")
POLL_S = 0.5
BATCH_S = 0.02  # to handle many simultaneous reports at once
CLOSE_S = 5.0
REFRESH_S = 3600.0
"""Interval of looks for metadata near their expiry, by both clocks: a computer that slept wakes days later, and clocks are set."""


class AgentRollout:
    """The newest roll-out of an agent release; `advance` is called again and again by one thread."""

    def __init__(self, server: Server, repository: Repository, publisher: Publisher) -> None:
        self._connection, self._roster, self._journal = server.connection, server.roster, server.journal
        self._repository, self._publisher = repository, publisher
        self._rollout = StoredRollout(
            server.journal.db, server.connection.topics.fleet, resume=True, subject="agent"
        )
        self._asked: dict[str, AgentUpdate] = {}
        server.connection.on_connected(lambda lost: self._asked.clear())

    def advance(self) -> None:
        """Collect outcomes, apply the rules, and ask devices."""
        for device, status in self._updatable():
            if status.id == self._rollout.assignment and status.state in CLOSED:
                failed = (status.why.partition(":")[0] or "failed") if status.state == "failed" else ""
                if failed and device.id not in self._rollout.reported:
                    log.warning("%s: agent: %s", device.id, status.why, extra={"device": device.id})
                self._rollout.add_outcome(device.id, status.id, Outcome(failed=failed))
        if self._rollout.advance([device.id for device, _ in self._updatable()], self._journal.blocked):
            stages = self._rollout.stages
            self._repository.reload()
            if stages and stages.state in WITHDRAWN:
                agent_releases.withdraw(self._repository, stages.release)
            self._publisher.publish_missing(metadata=True)
        for device, status in self._updatable():
            self._ask(device.id, status)

    def _updatable(self) -> Iterator[tuple[RosterDevice, UpdateStatus]]:
        """Devices whose agent can be updated, with how far they are: those that are present, and those that this update has reached.

        A device that restarts is absent for a while, and its outcome may arrive before it is back: without it the others would decide.
        """
        for device in self._roster.table.values():
            status = device.capability.update if device.capability else None
            if status is None or status.state == "declined" or self._journal.blocked(device.id):
                continue
            if device.ready or (status.id and status.id == self._rollout.assignment):
                yield device, status

    def _ask(self, device: str, status: UpdateStatus) -> None:
        """Ask a device for the agent that it should run now, unless it has been asked."""
        if not (self._rollout.admits(device) or self._rollout.returns(device)):
            return
        release, id = self._rollout.target(device)
        update = AgentUpdate(id, release)
        if status.id != update.id and not self._has_been_asked(device, update):
            self._asked[device] = self._connection.signed("agent", device, update)
            self._connection.publish(
                self._connection.topics.down(device, "agent"), self._asked[device], retain=True
            )

    def _has_been_asked(self, device: str, update: AgentUpdate) -> bool:
        """Whether this server has asked for the update, with a key that devices still trust."""
        asked, director = self._asked.get(device), self._connection.director
        if asked is None or asked.id != update.id:
            return False
        return not (director and asked.signature and director.is_stale(asked))


@dataclass(frozen=True)
class CoordinatorOptions:
    """Options of a coordinator. `resume`: also assign the release of a roll-out that ended before. `run_id`: see `RolloutCoordinator`.

    `inherited`: extras that a release takes over from an earlier one of the same extractor, and how heads are fitted with them. `sums`:
    subjects of the sums over devices that releases ask for. `serves`: which head devices serve.
    """

    plan: RolloutConfig = RolloutConfig()
    resume: bool = False
    run_id: str = ""
    quantiser: Quantiser | None = None
    watch: Watch = unwatched
    inherited: Mapping[str, Way] = field(default_factory=dict)
    sums: Sequence[str] = ()
    serves: Serves = "fleet"


DEFAULTS = CoordinatorOptions()


class RolloutCoordinator:
    """The releases of one fleet. `on_report` receives the accepted reports of heads on the releases of the run `run_id`.

    A background thread advances the roll-out, applies desired states from the registry and keeps the metadata valid. Close the coordinator
    before the server's connection.
    """

    def __init__(
        self,
        server: Server,
        repository: Repository,
        options: CoordinatorOptions = DEFAULTS,
        on_report: Callable[[str, Report], None] = lambda device, report: None,
        torch_device: str = "cpu",
    ) -> None:
        connection = server.connection
        assert connection.transport is not None
        self._connection, self._roster, self._journal = connection, server.roster, server.journal
        self._assignments, self._settings = server.assignments, server.settings
        self._repository, self._options, self._on_report = repository, options, on_report
        self._publisher = Publisher(connection.transport, connection.topics, repository, watch=options.watch)
        self._known = {manifest.release: manifest for manifest in repository.releases()}
        self._db, self._fleet = server.journal.db, connection.topics.fleet
        self._rollout = StoredRollout(self._db, self._fleet, resume=options.resume)
        # (device, assignment id)
        self._reported = {(device, self._rollout.assignment) for device in self._rollout.reported}
        self._agents = AgentRollout(server, repository, self._publisher)
        self._change = threading.Condition()
        self._publishing = threading.RLock()
        self._republish()
        self.head_updates = HeadUpdates(self._roster, self._count, torch_device)
        server.inbox.on_head(self._take_report, self.head_updates)
        connection.on("req", self._on_request)
        connection.on_connected(lambda lost: self._republish(chunks=lost))
        self._roster.on_change(lambda before, now: self._assign(now))
        self._closed, self._wake = threading.Event(), threading.Event()
        self._thread = threads.lasting(self._run, "edge-fl-rollout", stopped=self._closed)
        self._thread.start()

    @property
    def current(self) -> Manifest | None:
        """The release that heads should serve when the roll-out has ended."""
        stages = self._rollout.stages
        if stages is None:
            return None
        withdrawn = stages.state in ("aborted", "rolled_back")
        return self._known.get(self._rollout.previous if withdrawn else stages.release)

    @property
    def stages(self) -> Stages | None:
        """The state of the roll-out."""
        return self._rollout.stages

    def close(self) -> None:
        """Stop the background thread."""
        self._closed.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    def release(
        self,
        method: Method,
        shared: Parts,
        spec: MethodSpec,
        *,
        run_id: str,
        round: int,
        collect: bool = False,
        fleet: FleetExtra | None = None,
    ) -> Manifest:
        """Export, publish and roll out a release; with `collect`, devices send head updates on it. `fleet`: as of `export.release`.

        Raises ArtefactError if the export misses parity, MethodError for a method without an extractor.
        """
        with self._publishing, self._repository.locked():  # no other process takes the number
            origin = ReleaseOrigin(self._repository.next_release(), run_id, round)
            manifest, payloads = export.release(
                method,
                shared,
                spec,
                origin,
                collect=collect,
                quantiser=self._options.quantiser,
                serves=self._options.serves,
                fleet=fleet,
            )
            manifest = self._asking(manifest)
            for name, way in self._options.inherited.items():
                if payload := self.earlier_extra(name, manifest):
                    manifest, payloads = _with_extras(manifest, payloads, {name: payload}, way)
            self.head_updates.open(assignment_id(manifest.release), manifest, method)
            self.roll_out(manifest, payloads)
        return manifest

    def extend(self, extras: Mapping[str, bytes], way: Way, plan: RolloutConfig | None = None) -> Manifest:
        """Release the current extractor again with further extras, and heads fitted in this way, first to a panel of devices.

        plan: of the roll-out, by default that of the options. If the panel objects, the release before stays in use, with its extras.
        Raises ArtefactError.
        """
        with self._publishing, self._repository.locked():
            current = self.current
            assert current is not None
            manifest = self._asking(replace(current, release=self._repository.next_release()))
            payloads = {blob.sha256: self._publisher.kept(blob) or b"" for blob in blobs(current)}
            manifest, payloads = _with_extras(manifest, payloads, extras, way)
            self.roll_out(manifest, payloads, panel=True, plan=plan)
        return manifest

    def _asking(self, manifest: Manifest) -> Manifest:
        """The manifest with the sums that this run asks for."""
        return replace(manifest, sums=list(self._options.sums))

    def earlier_extra(self, name: str, manifest: Manifest) -> bytes | None:
        """The content of an extra in the newest kept release of the manifest's extractor, and of its classes or fewer, that has it.

        Releases that were withdrawn, or that no panel has let pass, do not count.
        """
        unproven = unproven_releases(rollouts.listed(self._db, self._fleet))
        for other in reversed(self._repository.releases()):
            same = other.extractor == manifest.extractor and extends(manifest.classes, other.classes)
            if same and name in other.extras and other.release not in unproven:
                return self._publisher.kept(other.extras[name])
        return None

    def roll_out(
        self,
        manifest: Manifest,
        payloads: Mapping[str, bytes],
        *,
        panel: bool = False,
        plan: RolloutConfig | None = None,
    ) -> None:
        """Publish a release and start its roll-out, with `panel` in two stages if there is a release to go back to.

        Raises ArtefactError if `payloads` do not match the manifest.
        """
        with self._publishing:
            self._publisher.publish(manifest, payloads)
        with self._change:
            self._known[manifest.release] = manifest
            self._rollout.begin(
                manifest.release, plan or self._options.plan, self._roster.head_devices(), panel=panel
            )
        self._assign_all()

    def wait(self, heads: int, deadline_s: float) -> list[str]:
        """Wait until at least `heads` devices, and all present head-only ones, have reported -> devices without a report."""
        until = time.monotonic() + deadline_s
        watch = self._options.watch
        with self._change:
            while self._rollout.moving or self._heads < heads or self.missing():
                watch(Count("heads", self._heads, max(heads, self._heads + len(self.missing()))))
                self._connection.check()
                if (left := until - time.monotonic()) <= 0:
                    break
                self._change.wait(min(left, POLL_S))
                self._change.wait_for(lambda: False, BATCH_S)
            watch(Count("heads", self._heads, self._heads))
        return self.missing()

    def rest(self, deadline_s: float) -> bool:
        """Wait until a roll-out in stages has ended or paused; whether it has."""
        until = time.monotonic() + deadline_s
        with self._change:
            while self._rollout.moving and (left := until - time.monotonic()) > 0:
                self._connection.check()
                self._change.wait(min(left, POLL_S))
        return not self._rollout.moving

    def missing(self) -> list[str]:
        """Present head-only devices whose stage has started and that have not reported on their release."""
        rollout = self._rollout
        due = [id for id in self._roster.head_devices() if rollout.admits(id) or rollout.returns(id)]
        return [id for id in due if (id, self._target(id)[1]) not in self._reported]

    @property
    def _heads(self) -> int:
        return sum(id == self._target(device)[1] for device, id in self._reported)

    def _assign(self, device: RosterDevice) -> None:
        if not device.ready or device.tier is not Tier.HEAD:
            return
        manifest, id = self._target(device.id)
        assignment = self._assignments.current(device.id)
        if manifest and (assignment is None or assignment.id != id):
            run_id, round, release = manifest.run_id, manifest.round, manifest.release
            self._assignments.assign(device.id, "serve", run_id=run_id, round=round, id=id, release=release)

    def _assign_all(self) -> None:
        for device in self._roster.table.values():
            self._assign(device)

    def _target(self, device: str) -> tuple[Manifest | None, str]:
        """The release that a device should serve now, and its assignment id."""
        if self._rollout.stages is None:
            return None, ""
        release, id = self._rollout.target(device)
        return self._known.get(release), id

    def _run(self) -> None:
        refreshed, outage = _times(), Outage(log, "roll-out")
        while not self._closed.is_set() and not self._connection.lost:
            self._wake.wait(POLL_S)
            self._wake.clear()
            try:
                with outage.logged():
                    self._advance()
                    with self._publishing:
                        self._agents.advance()
                    if any(
                        abs(now - then) > REFRESH_S for now, then in zip(_times(), refreshed, strict=True)
                    ):
                        refreshed = _times()
                        with self._publishing:
                            self._publisher.refresh()
                        self._assignments.refresh()
                        self._settings.refresh()
            except Exception:
                log.exception("roll-out: trying again in %g s", POLL_S)

    def _advance(self) -> None:
        if not self._rollout.advance(self._roster.head_devices(), self._journal.blocked):
            return
        with self._publishing:
            self._publisher.publish_missing()
            with self._change:
                self._known |= {manifest.release: manifest for manifest in self._repository.releases()}
            self._publish_current()
        self._assign_all()
        with self._change:
            self._change.notify_all()

    def _publish_current(self) -> None:
        """Publish the release to serve once more, unless it is the last published: its metadata must be newer than those of others."""
        current, stages = self.current, self._rollout.stages
        if current and current.release != self._repository.releases()[-1].release:
            self._publisher.republish(current.release)
        elif stages and not current:
            log.warning(
                "release %d: %s; there is no other kept release to serve", stages.release, stages.state
            )

    def _take_report(self, device: str, report: Report) -> UpdateVerdict | None:
        """The verdict on a report of a head; None while chunks of its head update are missing."""
        manifest = self._known.get(report.release)
        if manifest is None:
            return UpdateVerdict(report.id, "rejected", Failure.UNKNOWN_RELEASE)
        known = self._roster.get(device)
        if (known and known.tier is Tier.FULL) or not self._rollout.expects(device, report.id):
            return UpdateVerdict(report.id, "rejected", Failure.NOT_ASSIGNED)
        if not report.error and report.extractor not in manifest.extractors:
            return UpdateVerdict(report.id, "rejected", Failure.EXTRACTOR)
        try:
            require_numbers(report, HEAD_NUMBERS)
        except RejectedError as error:
            return UpdateVerdict(report.id, "rejected", error.reason, detail=error.message)
        if report.blob and not report.error:
            return self.head_updates.take_report(device, report)
        self._count(device, report)
        return UpdateVerdict(report.id, "accepted")

    def _count(self, device: str, report: Report) -> None:
        manifest = self._known.get(report.release)
        if manifest and manifest.run_id == self._options.run_id:
            self._on_report(device, report)
        if report.error:
            lines, text = self._journal.lines, "%s: release %d: %s"
            level = logging.INFO if report.error == Failure.NO_LABELS else logging.WARNING
            lines.write(log, level, device, text, device, report.release, report.error)
        with self._change:
            self._rollout.add_outcome(device, report.id, self._outcome_of(report))
            self._reported.add((device, report.id))
            self._change.notify_all()
        self._wake.set()

    def _outcome_of(self, report: Report) -> Outcome:
        """A device without pictures says nothing about a release of the same extractor: it could not fit a head before, either."""
        before, now = self._known.get(self._rollout.previous), self._known.get(report.release)
        same = before and now and before.extractor == now.extractor
        return Outcome() if same and report.error in UNLABELLED else outcome_of(report.error, report.metrics)

    def _on_request(self, received: ReceivedMessage) -> None:
        """Publish metadata or chunks of a release again that a device is missing."""
        request = received.message
        if isinstance(request, Request) and request.kind == "metadata":
            self._connection.run_in_background("metadata", lambda: self._republish(chunks=False))
        elif isinstance(request, Request) and request.kind == "chunks":
            self._connection.run_in_background(f"repair {request.sha256}", lambda: self._repair(request))

    def _repair(self, request: Request) -> None:
        with self._publishing:
            self._publisher.repair(request.sha256, request.missing)

    def _republish(self, *, chunks: bool = True) -> None:
        with self._publishing:
            self._publisher.republish_all(chunks=chunks)


def _times() -> tuple[float, float]:
    """The time since the start of this computer, without what it slept, and that of its clock."""
    return time.monotonic(), time.time()


def _with_extras(
    manifest: Manifest, payloads: Mapping[str, bytes], extras: Mapping[str, bytes], way: Way
) -> tuple[Manifest, dict[str, bytes]]:
    added = {name: describe(payload) for name, payload in extras.items()}
    heads = replace(manifest.heads, way=way, fleet=manifest.heads.fleet or next(iter(extras)))
    named = {added[name].sha256: payload for name, payload in extras.items()}
    return replace(manifest, extras={**manifest.extras, **added}, heads=heads), {**payloads, **named}
