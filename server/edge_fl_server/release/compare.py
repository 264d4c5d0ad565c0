"""Compare two releases by the accuracies that the same head-only devices reported on both."""

from msgspec import Struct

from edge_fl.console import units
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import InputError
from edge_fl_server.registry import Database, registered_reports, rollouts
from edge_fl_server.runs.summaries import Paired, paired


class Comparison(Struct, frozen=True):
    """The accuracies (0..1) of devices on two releases, and their mean difference; None if no device measured both.

    `same_images`: each device classified the same samples with both when it installed the new one; otherwise its newest accuracy on each
    counts, whose samples may differ.
    """

    old: int
    new: int
    before: dict[str, float]
    after: dict[str, float]
    same_images: bool

    @property
    def found(self) -> Paired | None:
        """The mean of `after` minus `before` over the devices with both."""
        return paired(self.before, self.after)

    @property
    def columns(self) -> Columns:
        """Fields of a row, and their headings."""
        return {
            "device": "device",
            "before": Column(f"release {self.old}", units.percent),
            "after": Column(f"release {self.new}", units.percent),
            "change": Column("change", units.points),
        }

    @property
    def rows(self) -> list[dict[str, object]]:
        """The devices with both accuracies, those that lost most first."""
        both = self.before.keys() & self.after.keys()
        rows = [(self.after[name] - self.before[name], name) for name in both]
        return [
            {"device": name, "before": self.before[name], "after": self.after[name], "change": change}
            for change, name in sorted(rows)
        ]


def releases(db: Database, fleet: str, old: int | None = None, new: int | None = None) -> Comparison:
    """Compare two releases, by default the one that is being rolled out, or is in service, with the one that it replaces.

    Raises InputError for one that never was.
    """
    records, current = rollouts.listed(db, fleet), rollouts.current(db, fleet)
    new = new or (current.release if current else rollouts.served_release(db, fleet))
    replaced = [record.previous for record in reversed(records) if record.release == new and record.previous]
    old = old or (replaced[0] if replaced else 0)
    known = sorted({record.release for record in rollouts.releases_of(db, fleet)})
    for release in (old, new):
        if release not in known:
            what = f"release {release}" if release else "no release to compare with"
            raise InputError(
                f"fleet {fleet!r}: {what}; expected two of {', '.join(map(str, known)) or 'none yet'}",
                "nothing was compared",
            )
    if replaced[:1] == [old] and (pairs := registered_reports.first_pairs_on(db, fleet, new)):
        before, after = ({name: pair[place] for name, pair in pairs.items()} for place in (0, 1))
        return Comparison(old, new, before, after, same_images=True)
    before, after = (registered_reports.accuracies_on(db, fleet, release) for release in (old, new))
    return Comparison(old, new, before, after, same_images=False)


def sentence(compared: Comparison) -> str:
    """The answer in one line: difference, interval, n, both means, and whether it is more than chance."""
    found = compared.found
    what = f"release {compared.new} compared with {compared.old}"
    if found is None:
        return f"{what}: not measured yet: it takes devices with an accuracy on both"
    images = "on the same samples" if compared.same_images else "newest accuracy on each"
    return (
        f"{what}: {found.words}, {units.percent(found.before)} -> {units.percent(found.after)},"
        f" same devices, {images}: {found.meaning}"
    )
