"""What runs where: every release with the devices that run it, and the roll-outs with how far each has come."""

from __future__ import annotations

from msgspec import Struct
from sqlalchemy import case, func, select

from server.registry import Database, releases, rollouts
from server.registry.records import ReleaseRecord, RolloutRecord
from server.registry.tables import devices, reports

NEWEST = 50


class Answers(Struct, frozen=True):
    """What devices reported on one release: how many, how many could not run it, and the mean accuracy before and after."""

    heard: int = 0
    failed: int = 0
    before: float | None = None
    after: float | None = None


class ReleasesPage(Struct, frozen=True):
    """Releases and roll-outs, the newest first; `running` maps a release to how many devices say that they run it.

    `kept` are the releases whose files the server still has, None where nobody can tell.
    """

    releases: tuple[ReleaseRecord, ...]
    running: dict[int, int]
    answers: dict[int, Answers]
    rollouts: tuple[RolloutRecord, ...]
    current: RolloutRecord | None
    heads: int
    kept: frozenset[int] | None = None

    @property
    def serving(self) -> int:
        """The release that the fleet was brought to last; 0 for none."""
        return serving(self.rollouts) or max(self.running, default=0)


def page(db: Database, fleet: str, kept: frozenset[int] | None = None) -> ReleasesPage:
    """The releases and roll-outs of a fleet."""
    found = tuple(rollouts.listed(db, fleet)[:NEWEST])
    tier = devices.c.capability["tier"].as_string()
    mine = (devices.c.fleet == fleet) & (devices.c.release > 0)
    with db.reading() as connection:
        by_release = connection.execute(
            select(devices.c.release, func.count()).where(mine).group_by(devices.c.release)
        )
        running: dict[int, int] = dict(by_release.all())
        heads = connection.execute(
            select(func.count()).select_from(devices).where(devices.c.fleet == fleet, tier == "head")
        ).scalar_one()
        told = connection.execute(
            select(
                reports.c.release,
                func.count(func.distinct(reports.c.device)),
                func.sum(case((reports.c.error != "", 1), else_=0)),
                func.avg(reports.c.before),
                func.avg(reports.c.after),
            )
            .where(reports.c.fleet == fleet, reports.c.kind == "head", reports.c.release > 0)
            .group_by(reports.c.release)
        )
        answers = {release: Answers(heard, int(bad or 0), b, a) for release, heard, bad, b, a in told}
    current = next((record for record in found if record.state not in rollouts.OVER), None)
    return ReleasesPage(
        tuple(releases.listed(db, fleet)[:NEWEST]), running, answers, found, current, heads, kept
    )


def serving(found: tuple[RolloutRecord, ...]) -> int:
    """The release that the roll-outs, the newest first, say that the fleet serves: what a new one goes back to."""
    for record in found:
        if record.state == "completed":
            return record.release
        if record.previous:
            return record.previous
    return 0
