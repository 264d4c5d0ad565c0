"""What all pages share: the fleet, its registry, and the folders of releases and certificates where they are on this machine."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import EdgeFLError
from edge_fl.files.paths import text
from edge_fl.release.manifests import Manifest
from edge_fl_console.alerts import rules
from edge_fl_console.alerts.rules import AlertSettings
from edge_fl_console.dashboard.auth import LOCAL, PageAccess
from edge_fl_server.registry import Database
from edge_fl_server.registry.database import location, shown

HOME, IDENTITIES = Path("runs/releases"), Path("runs/identities")  # defaults of the commands
FLEET = "main"


@dataclass(frozen=True)
class PageContext:
    """The fleet that the pages show, and to whom. `home`: the folder of its releases; `registry`: where `db` was opened."""

    db: Database
    fleet: str
    home: Path | None = None
    registry: str = ""
    access: PageAccess = LOCAL

    def kept(self) -> frozenset[int] | None:
        """The releases whose files still exist; None where the repository is not on this machine."""
        manifests = self._manifests()
        return None if manifests is None else frozenset(manifest.release for manifest in manifests)

    @property
    def classes(self) -> int:
        """The number of the fleet's classes, by its newest release; 0 where that is unknown."""
        return max(((one.release, len(one.classes)) for one in self._manifests() or ()), default=(0, 0))[1]

    def _manifests(self) -> Sequence[Manifest] | None:
        folder = self.home / self.fleet if self.home else None
        if folder is None or not (folder / "metadata").is_dir():
            return None
        from edge_fl_server.release.repository import Repository

        try:
            return Repository(folder).releases()
        except EdgeFLError:
            return None

    @property
    def alerts(self) -> AlertSettings:
        """The rules of alerts next to the releases; the default ones where that file is not on this machine, or cannot be read."""
        try:
            return rules.load(rules.path_of(self.home or HOME, self.fleet), self.db, self.fleet)
        except EdgeFLError:
            return rules.DEFAULT

    @property
    def identities(self) -> Path | None:
        """The folder of the fleet's CA, next to the releases; None where it is not on this machine."""
        folder = (self.home or HOME).parent / IDENTITIES.name
        return folder if (folder / "ca.key").is_file() else None

    def command(self, words: str) -> str:
        """A command of edge-fl on this fleet, with the options that differ from their defaults, as a shell takes it."""
        home = self.home or HOME
        options = ["--fleet", self.fleet] if self.fleet != FLEET else []
        options += ["--home", text(home)] if home != HOME else []
        if self.registry and self.registry != location("", home):
            options += ["--database", shown(self.registry)]
        return " ".join(["edge-fl", words, *map(shlex.quote, options)])
