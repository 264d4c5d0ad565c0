"""Commands on releases: list, roll out, pause, abort, roll back. A running server carries them out, otherwise this process does.

A command that fails leaves nothing for a later server to carry out: nothing is requested before it is known who carries it out, and a
roll-out that no server carries out any longer is paused.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edge_fl.console import units
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.console.tables import Column, Columns, cell_text
from edge_fl.errors import ConnectError, DeadlineError, GateError, InputError, RunError
from edge_fl.files.paths import text
from edge_fl.release.agent import AgentRelease
from edge_fl.release.manifests import Manifest
from edge_fl.secure.signatures import Authorities
from edge_fl.wire.roles import Person, local_person
from edge_fl.wire.topics import Topics
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import ServerConnect
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import connected
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, audit, rollouts
from edge_fl_server.registry.rollouts import NO_RUN, WayBack
from edge_fl_server.registry.tables import COMMAND_ENDED, DesiredRolloutState, RolloutRecord, Subject
from edge_fl_server.release import agent_releases, ownership
from edge_fl_server.release.export import (
    Description,
    Exported,
    QuantisedExtractor,
    ReleaseOrigin,
    assemble,
)
from edge_fl_server.release.publish import store
from edge_fl_server.release.repository import Repository, require_grown
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from edge_fl_server.release.rollout.director import Director
from edge_fl_server.release.rollout.stages import ALL_AT_ONCE, cause
from edge_fl_server.release.rollout.stored_rollout import request

POLL_S = 0.2
NOTHING = "nothing was requested"
AGENT_COLUMNS: Columns = {
    "number": "agent release",
    "version": "version",
    "bytes": Column("size", units.size, rank=1),
    "state": "roll-out",
    "stage": "stage",
    "reason": Column("why", prose=True),
    "flags": "flags",
}
"""Fields of a row of `release agents`, and their headings."""
STEERING = {"paused": "pause", "running": "resume", "aborted": "abort", "rolled_back": "rollback"}
"""Desired state -> action, as in `edge_fl.wire.roles`."""
Request = Callable[[], int]
"""Writes a desired state into the registry -> the number of the roll-out."""
COLUMNS: Columns = {
    "release": "release",
    "method": "method",
    "run_id": Column("run", lambda run: "no run" if run == NO_RUN else run),
    "round": Column("round", lambda round: cell_text(round or None)),
    "bytes": Column("size", units.size, rank=1),
    "service": "service",
    "state": "roll-out",
    "stage": "stage",
    "reason": Column("why", prose=True),
}
"""Fields of a row of `release list`, and their headings."""


@dataclass(frozen=True)
class ReleaseCommands:
    """Commands on the releases of one fleet, which are kept in the folder `home`/`fleet`. `authorities`: the CAs of its devices."""

    connect: ServerConnect
    fleet: str
    home: Path
    db: Database
    person: Person = field(default_factory=local_person)
    authorities: Authorities = ()

    @property
    def repository(self) -> Repository:
        """The repository of the fleet's releases. Raises InputError if nothing was released."""
        return Repository.existing(self.home, self.fleet)

    def rows(self) -> list[dict[str, object]]:
        """The kept releases, newest first, each with the state of its last roll-out and whether the fleet serves it or left it."""
        records = rollouts.listed(self.db, self.fleet)
        taken_back = rollouts.withdrawn(records).items()
        service = {release: "rolled back" for release, record in taken_back if record.state != "aborted"}
        service[rollouts.served_release(self.db, self.fleet)] = "in service"
        return [
            {
                "release": manifest.release,
                "method": manifest.method,
                "run_id": manifest.run_id,
                "round": manifest.round,
                "bytes": manifest.bytes,
                "service": service.get(manifest.release, ""),
                **_last_rollout(records, manifest.release),
            }
            for manifest in reversed(self.repository.releases())
        ]

    def sign(
        self, exported: Exported, description: Description, int8: QuantisedExtractor | None = None
    ) -> Manifest:
        """Sign an extractor that no run trained as the next release, on disk alone; the last or a withdrawn release if it is the same.

        A command that was killed afterwards is completed by repeating it. Raises InputError for reordered classes.
        """
        repository = Repository(self.home / self.fleet)
        with repository.locked():
            kept = repository.releases()
            require_grown(description.classes, kept)
            origin = ReleaseOrigin(repository.next_release(), NO_RUN, 0)
            manifest, payloads = assemble(exported, description, origin, quantiser=lambda *_: int8)
            withdrawn = rollouts.withdrawn(rollouts.listed(self.db, self.fleet))
            for each in kept:
                if _same(each, manifest) and (each is kept[-1] or each.release in withdrawn):
                    return each
            with audit.acting(self.db, self.fleet, self.person, "publish", f"release {manifest.release}"):
                ownership.take(self.db, self.fleet, self.home)
                store(repository, manifest, payloads)
        rollouts.record_release(self.db, rollouts.published(self.fleet, manifest))
        return manifest

    def is_served(self, release: int) -> bool:
        """Whether the fleet serves this release and no roll-out is under way."""
        unfinished = rollouts.current(self.db, self.fleet)
        return unfinished is None and rollouts.served_release(self.db, self.fleet) == release

    def roll_out(
        self, release: int | None, plan: RolloutConfig, action: str = "start", *, again: bool = False
    ) -> Request:
        """Roll out a kept release (None: the last), or resume a paused roll-out.

        Raises InputError, also for a release that was withdrawn, unless `again`.
        """
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished and release in (None, unfinished.release):
            return self.steer("running")
        kept = [manifest.release for manifest in self.repository.releases()]
        target = kept[-1] if release is None and kept else release
        if target is None or target not in kept:
            raise InputError(f"release {target or 'to roll out'}: not kept, only {kept} are")
        if not again:
            _require_not_withdrawn(f"release {target}", rollouts.listed(self.db, self.fleet), target)
        write = partial(request, self.db, self.fleet, target, plan)
        return self._audited(action, f"release {target}", write)

    def _audited(self, action: str, subject: str, write: Request) -> Request:
        """The request, with a row in the audit log."""

        def audited() -> int:
            with audit.acting(self.db, self.fleet, self.person, action, subject):
                return write()

        audit.permit(self.db, self.fleet, self.person, action, subject)  # before anything connects
        return audited

    def steer(self, desired: DesiredRolloutState, subject: Subject = "extractor") -> Request:
        """Pause, resume, abort or roll back the current roll-out. Raises InputError if there is none."""
        unfinished = rollouts.current(self.db, self.fleet, subject)
        if unfinished is None:
            of_agent = " of an agent release" if subject == "agent" else ""
            raise InputError(f"fleet {self.fleet!r}: no roll-out{of_agent} is under way")

        def write() -> int:
            rollouts.steer(self.db, unfinished.number, desired)
            return unfinished.number

        return self._audited(STEERING[desired], unfinished.name, write)

    def agent_rows(self) -> list[dict[str, object]]:
        """The kept agent releases, newest first, each with the state of its last roll-out."""
        records = rollouts.listed(self.db, self.fleet, "agent")
        return [
            {
                "number": release.number,
                "version": release.version,
                "bytes": sum(wheel.blob.bytes for wheel in release.wheels),
                **_last_rollout(records, release.number),
                "flags": ", ".join(flag for flag in ("downgrade", "withdrawn") if getattr(release, flag)),
            }
            for release in reversed(agent_releases.listed(self.repository))
        ]

    def roll_out_agent(
        self, targets: Sequence[str], plan: RolloutConfig, *, downgrade: bool, again: bool = False
    ) -> Request:
        """Roll out wheels, the newest kept agent release of a version, or without targets the newest or paused one.

        Raises InputError, also for the wheels of a release that was withdrawn, unless `again`.
        """
        audit.permit(self.db, self.fleet, self.person, "start", "agent release")  # before anything is signed
        if targets and all(target.endswith(".whl") for target in targets):
            repository = Repository(self.home / self.fleet)
            wheels = [Path(target) for target in targets]
            if not again and (number := agent_releases.withdrawn(repository, wheels)):
                records = rollouts.listed(self.db, self.fleet, "agent")
                _require_not_withdrawn(f"agent release {number}", records, number)
            with audit.acting(
                self.db,
                self.fleet,
                self.person,
                "publish",
                f"agent release: {', '.join(text(each.name) for each in wheels)}",
            ):
                ownership.take(self.db, self.fleet, self.home)
                release = agent_releases.sign(repository, wheels, downgrade=downgrade)
        else:
            unfinished = rollouts.current(self.db, self.fleet, "agent")
            if unfinished and not targets:
                return self.steer("running", "agent")
            release = self._kept_agent(targets)
        write = partial(request, self.db, self.fleet, release.number, plan, "agent")
        return self._audited("start", f"agent release {release.number}", write)

    def way_back(self, release: int | None = None) -> WayBack:
        """The roll-back to a release, by default to the newest older good one (`rollouts.way_back`). Raises InputError."""
        kept = frozenset(manifest.release for manifest in self.repository.releases())
        return rollouts.way_back(self.db, self.fleet, release or 0, kept)

    def roll_back(self, way: WayBack) -> Request:
        """Go back to an older release on all devices at once. Raises InputError."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished and unfinished.previous == way.to:
            return self.steer("rolled_back")
        return self.roll_out(way.to, RolloutConfig(stages=ALL_AT_ONCE), "rollback")

    def _kept_agent(self, targets: Sequence[str]) -> AgentRelease:
        """The newest agent release that was not withdrawn, of one version or any. Raises InputError."""
        kept = agent_releases.listed(self.repository)
        found = [one for one in kept if not targets or targets == [one.version]]
        if usable := [one for one in found if not one.withdrawn]:
            return usable[-1]
        where = f"agent release {' '.join(targets)}"
        if found:
            record = rollouts.withdrawn(rollouts.listed(self.db, self.fleet, "agent")).get(found[-1].number)
            why = record.withdrawal if record else "its roll-out was aborted"
            raise InputError(f"{where}: {why}; expected its wheels (.whl) and --again", NOTHING)
        versions = ", ".join(release.version for release in kept if not release.withdrawn) or "none"
        raise InputError(f"{where}: expected wheels (.whl) or one kept version ({versions})", NOTHING)

    def carry_out(
        self, request: Request, report: Callable[[str], None], deadline_s: float, watch: Watch = unwatched
    ) -> RolloutRecord:
        """Make the request and wait until the roll-out has ended or paused; carry it out here if no server is online.

        `report` receives a line per state, `watch` the current stage. Raises DeadlineError, ConnectError.
        """
        if self.is_online():
            report("the running server carries it out")
            number = request()
            try:
                return self._follow(number, report, deadline_s, watch)
            except DeadlineError as error:
                if self.is_online():
                    raise DeadlineError(error.message, "the running server continues it") from error
                self._pause(number)
                raise
        report("no server is online: carried out from here")
        with (
            Journal(self.db, self.fleet) as journal,
            connected(
                ServerConnection(
                    self.connect,
                    journal,
                    director=Director(self.repository, self.fleet),
                    authorities=self.authorities,
                )
            ) as server,
        ):
            ownership.take(self.db, self.fleet, self.home)
            number, options = request(), CoordinatorOptions(watch=watch)
            try:
                with closing(RolloutCoordinator(server, self.repository, options)) as coordinator:
                    record = self._follow(number, report, deadline_s, watch, server.connection.check)
                    coordinator.wait(0, max(1.0, min(deadline_s, 60.0)))
                    return record
            finally:
                self._pause(number)

    def _follow(
        self,
        number: int,
        report: Callable[[str], None],
        deadline_s: float,
        watch: Watch,
        check: Callable[[], None] = lambda: None,
    ) -> RolloutRecord:
        until_s, reported = time.monotonic() + deadline_s, ""
        while True:
            check()
            record = rollouts.get(self.db, number)
            if record is None:
                raise InputError(f"roll-out {number}: not in the registry")
            if (status := f"{record.name}: {_status(record)}") != reported:
                report(reported := status)
            watch(Count("stages", record.stage, len(record.shares)))
            if record.state in rollouts.OVER or (record.state == record.desired == "paused"):
                return record
            if time.monotonic() > until_s:
                resume = "agent" if record.subject == "agent" else "rollout"
                raise DeadlineError(
                    f"{record.name}: after {deadline_s:g} s {_status(record)}",
                    consequence=f"it is paused, 'edge-fl release {resume}' resumes it",
                )
            time.sleep(POLL_S)

    def _pause(self, number: int) -> None:
        """Pause a roll-out that has not ended and that no server carries out any longer."""
        record = rollouts.get(self.db, number)
        if record and record.state == "running":
            rollouts.steer(self.db, number, "paused")
            if changed := rollouts.get(self.db, number):
                rollouts.advance(self.db, changed, state="paused", reason=COMMAND_ENDED)

    def is_online(self) -> bool:
        """Whether a server is online. Raises ConnectError without a broker, ConfigError if the fleet is that of another registry."""
        try:
            topics = Topics(self.fleet)
            state = connector.server_state(self.connect, topics, connector.LIMITS)
            ownership.require(self.db, self.fleet, self.home, state)
            if state is None or not state.online:
                return False
            return connector.is_alive(self.connect, topics, state.boot, connector.LIMITS)
        except ConnectError as error:
            raise ConnectError(error.message, consequence=NOTHING) from error


def _last_rollout(records: Sequence[RolloutRecord], release: int) -> dict[str, str]:
    """State, stage and reason of the newest roll-out of a release, all "" without one."""
    for record in records:
        if record.release == release:
            stage = f"{record.stage + 1} of {len(record.shares)}"
            return {"state": record.state, "stage": stage, "reason": record.explanation}
    return dict.fromkeys(("state", "stage", "reason"), "")


def failure(record: RolloutRecord) -> GateError | RunError:
    """The error of a command whose roll-out ended in another state than it should."""
    agent = record.subject == "agent"
    abort, listing = (
        f"edge-fl release abort{' --agent' * agent}",
        f"edge-fl release {'agents' if agent else 'list'}",
    )
    consequence = {
        "paused": f"its devices keep it until '{abort}'; '{listing}' shows it",
        "aborted": "its devices return to the release before",
    }.get(record.state, "")
    kind = GateError if record.by_gate else RunError
    return kind(f"{record.name}: {record.state}, {record.reason}", consequence)


def _require_not_withdrawn(name: str, records: Sequence[RolloutRecord], release: int) -> None:
    """Raise InputError if the release was aborted or rolled back in these roll-outs, newest first."""
    if record := rollouts.withdrawn(records).get(release):
        raise InputError(f"{name}: {record.withdrawal}; expected --again to roll it out once more", NOTHING)


def _same(kept: Manifest, manifest: Manifest) -> bool:
    """Whether two releases differ at most in their numbers."""

    def what(release: Manifest) -> object:
        return release.extractors, release.classes, release.input, release.method, release.heads

    return what(kept) == what(manifest)


def _status(record: RolloutRecord) -> str:
    shares = record.shares
    share = f"stage {record.stage + 1} of {len(shares)} ({shares[min(record.stage, len(shares) - 1)]:.0%})"
    why = cause(record.reason, record.stage)
    return f"{record.state}, {share}{', ' + why if why else ''}"
