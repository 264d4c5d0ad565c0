"""A fleet with certificates whose broker and server are the real commands, in the folder of one machine, and whose devices are boards."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_fl.cli import main
from edge_fl_server.children import CommandProcess, CommandProcesses
from edge_fl_server.registry import Database, fleets, rollouts
from edge_fl_server.release.publish import store
from edge_fl_server.release.repository import Repository
from tests.agents import Board, eventually
from tests.devices import graphs
from tests.devices.site import samples

START_S = 240.0


@dataclass
class Machine:
    """A machine of the operator: `runs` in its folder holds everything. `commands` run in this process, services in their own."""

    folder: Path
    port: int
    children: CommandProcesses
    capsys: pytest.CaptureFixture[str]
    services: list[CommandProcess] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def identities(self) -> Path:
        return self.runs / "identities"

    def place(self, command: str, port: int = 0) -> list[str]:
        """The options that name this machine's folders and broker, as far as the command has them."""
        group, name, *_ = command.split()
        if (group, name) in {("fleet", "certificates"), ("fleet", "enrol"), ("broker", "certificate")}:
            return ["--identities", str(self.identities)]
        options = ["--home", str(self.runs / "releases")]
        if (group, name) == ("server", "backup"):
            return [*options, "--identities", str(self.identities)]
        if (group, name) == ("fleet", "list") or (group, name) in STEERS:
            options += ["--port", str(port or self.port), "--identity", str(self.identities / "operator")]
        return options

    def run(self, command: str, *arguments: str, code: int | None = 0, port: int = 0) -> str:
        """Run a command here -> its stdout; `port`: of another machine's broker."""
        self.capsys.readouterr()
        ended = main([*command.split(), *arguments, *self.place(command, port)])
        said = self.capsys.readouterr()
        assert code is None or ended == code, f"{command}: {ended}\n{said.err}"
        return said.out

    def rows(self, command: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run(f"{command} --format json"))
        return found

    def start_broker(self) -> None:
        options = ("--identities", str(self.identities), "--dir", str(self.runs / "broker"))
        broker = self.children.start("broker", "broker", "up", "--port", str(self.port), *options)
        self.children.wait_listening(broker, self.port, START_S)
        self.services.append(broker)

    def start_server(self) -> None:
        options = ("--home", str(self.runs / "releases"), "--identity", str(self.identities / "server"))
        self.services.append(
            self.children.start("server", "server", "up", "--port", str(self.port), *options)
        )
        eventually(self._is_online, "the server is online", START_S)

    def _is_online(self) -> bool:
        if not (self.runs / "server" / "registry.sqlite").exists():
            return False
        with self.registry() as db:
            return bool(fleets.id_of(db, "main")) and fleets.presence(db, "main").online

    def stop(self) -> None:
        """End the server, then the broker."""
        while self.services:
            self.services.pop().end()

    @contextmanager
    def registry(self) -> Iterator[Database]:
        with closing(Database.open(self.runs / "server" / "registry.sqlite")) as db:
            yield db

    def store_release(self, scale: float = 1.0, *, good: bool = True) -> int:
        """Sign an extractor as the next release, on disk; one that is not `good` fails its canary on devices."""
        repository = Repository(self.runs / "releases" / "main")
        payload = graphs.graph(weights=graphs.WEIGHTS * scale)
        question = graphs.Canary(seed=5, images=2, features=[])
        features = graphs.canary_input(question, graphs.INPUT).reshape(2, -1) @ (
            graphs.WEIGHTS * scale * good
        )
        manifest = graphs.manifest_for(payload, release=repository.next_release(), expected=features)
        store(repository, manifest, {manifest.extractor.sha256: payload})
        with self.registry() as db:
            rollouts.record_release(db, rollouts.published("main", manifest))
        return manifest.release


STEERS = {("release", name) for name in ("rollout", "pause", "agent", "rollback", "abort")}


def boards(folder: Path, factory: Path, machine: Machine, *names: str) -> dict[str, Board]:
    """Boards with the identities that the machine made for them, copied, as on cards."""
    folder.mkdir(exist_ok=True)
    data = samples(60, 0)
    np.savez(folder / "images.npz", x=data.x, y=data.y)
    made = {}
    for name in names:
        own = folder / name / "identity"
        shutil.copytree(machine.identities / "devices" / name, own)
        own.chmod(0o700)
        made[name] = Board(
            folder / name, factory, name, machine.port, folder / "images.npz", fleet="main", identity=own
        )
    return made


def all_serve(machine: Machine, release: int, *names: str) -> None:
    """Wait until these devices serve a release, are connected, and have no fault."""
    found: list[dict[str, Any]] = []

    def serve() -> bool:
        found[:] = machine.rows("fleet list")
        there = {row["device"]: row for row in found}
        return all(
            name in there
            and there[name]["release"] == release
            and there[name]["status"] == "ready"
            and not there[name]["why"]
            for name in names
        )

    eventually(serve, f"{names} serve release {release}: {found}", START_S)
