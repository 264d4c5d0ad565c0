"""From a round's model to the heads that serve it: export, publish, tell every head-only device, and note what they report.

A head-only device is told of the current release as soon as it is ready, also one that comes late or returns. A release is not overtaken:
before the next, devices that are there may finish with the last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_fl.capability import Tier
from edge_fl.config import TaskSpec
from edge_fl.learn.tree import Parts
from edge_fl.methods.method import Method
from edge_fl.release.manifest import Manifest
from edge_fl.release.repository import Repository
from edge_fl.wire.messages import Report, Request
from server.release import export
from server.release.publish import Publisher
from server.wire.contributions import Contributions
from server.wire.exchange import Verdict
from server.wire.inbox import Inbox
from server.wire.link import Heard, Link
from server.wire.roster import Device, Roster
from server.wire.wants import Wants

log = logging.getLogger(__name__)

POLL_S = 0.5


class Rollout:
    """The releases of one task. `heard` sees every report of a head that counts. Made after the link is open."""

    def __init__(
        self,
        link: Link,
        roster: Roster,
        inbox: Inbox,
        wants: Wants,
        repository: Repository,
        task: str,
        spec: TaskSpec,
        heard: Callable[[str, Report], None] = lambda device, report: None,
        torch_device: str = "cpu",
    ) -> None:
        assert link.transport is not None
        self._link, self._roster, self._wants, self._repository = link, roster, wants, repository
        self._task, self._spec, self._heard = task, spec, heard
        self._publisher = Publisher(link.transport, link.topics, repository)
        self._known = {manifest.release: manifest for manifest in repository.releases()}
        self._current: Manifest | None = None
        self._reported: set[str] = set()
        self._change = threading.Condition()
        self._publishing = threading.Lock()
        self._reassert()
        self.contributions = Contributions(roster, self._count, torch_device)
        inbox.on_head(self._take, self.contributions)
        link.on("req", self._asked)
        link.on_fresh_broker(self._reassert)
        roster.on_change(self._offer)

    @property
    def current(self) -> Manifest | None:
        """The release that heads are to serve now."""
        return self._current

    def release(self, method: Method, shared: Parts, round: int, *, collect: bool = False) -> Manifest:
        """Exports, publishes and offers one release; with `collect`, devices may send back what the method can use.

        Raises ArtefactError when the export misses parity, MethodError without one.
        """
        number = self._repository.next_release()
        manifest, payloads = export.release(
            method, shared, self._spec, number=number, task=self._task, round=round, collect=collect
        )
        self.contributions.open(f"rel-{number}", manifest, method)
        with self._publishing:
            self._publisher.publish(manifest, payloads)
        with self._change:
            self._known[number], self._current, self._reported = manifest, manifest, set()
        for device in self._roster.table.values():
            self._offer(None, device)
        return manifest

    def wait(self, heads: int, deadline_s: float) -> list[str]:
        """Waits until `heads` devices (0: all head-only devices that are there) reported on the current release -> those that did not."""
        until = time.monotonic() + deadline_s
        with self._change:
            while len(self._reported) < heads if heads else self.missing():
                self._link.check()
                if (left := until - time.monotonic()) <= 0:
                    break
                self._change.wait(min(left, POLL_S))
        return self.missing()

    def missing(self) -> list[str]:
        """Head-only devices that are there and have not reported on the current release."""
        return [id for id in self._roster.head_devices() if id not in self._reported] if self._current else []

    def _offer(self, before: Device | None, now: Device) -> None:
        current = self._current
        if current is None or not now.ready or now.tier is not Tier.HEAD:
            return
        want = self._wants.current(now.id)
        if want is None or want.release != current.release:
            id = f"rel-{current.release}"
            self._wants.ask(
                now.id, "serve", task=self._task, round=current.round, id=id, release=current.release
            )

    def _take(self, device: str, report: Report) -> Verdict | None:
        """The answer to a report of a head; None while parts that come with it are on their way."""
        manifest = self._known.get(report.release)
        if manifest is None:
            return Verdict(report.id, "rejected", "unknown_release")
        if not report.error and report.extractor != manifest.extractor.sha256:
            return Verdict(report.id, "rejected", "extractor")
        if report.blob and not report.error:
            return self.contributions.take_report(device, report)
        self._count(device, report)
        return Verdict(report.id, "accepted")

    def _count(self, device: str, report: Report) -> None:
        self._heard(device, report)
        if report.error:
            log.warning("%s: release %d: %s", device, report.release, report.error)
        with self._change:
            if self._current and report.release == self._current.release:
                self._reported.add(device)
            self._change.notify_all()

    def _asked(self, heard: Heard) -> None:
        """A device misses metadata, or chunks of a release, that the broker should have."""
        request = heard.message
        if isinstance(request, Request) and request.ask == "metadata":
            self._link.aside("metadata", lambda: self._reassert(chunks=False))
        elif isinstance(request, Request) and request.ask == "chunks":
            self._link.aside(f"repair {request.sha256}", lambda: self._repair(request))

    def _repair(self, request: Request) -> None:
        with self._publishing:
            self._publisher.repair(request.sha256, request.missing)

    def _reassert(self, *, chunks: bool = True) -> None:
        with self._publishing:
            if self._known:
                self._publisher.reassert(chunks=chunks)
