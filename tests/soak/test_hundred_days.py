"""Boards that live on: each day people change the pictures and something happens to a board, the broker, the server or the clock.

At the end of each day every board serves the head that a fresh device with the same pictures would have, the server knows it, and no
picture is lost. CI has three days of two boards, on which all of it happens, `make nightly` a hundred with an emulated one, too.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import ceil
from pathlib import Path

import pytest

from edge_fl.wire.messages import Assignment
from edge_fl_devices import config as settings
from edge_fl_devices.agent.effects import Fit
from edge_fl_devices.agent.events import Finished
from edge_fl_devices.data.load import streamer
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from tests import agents
from tests.agents import eventually
from tests.arm64.pi import require
from tests.power import Disk, fill
from tests.soak.album import CLASSES, Album
from tests.soak.boards import SITE, ArmBoard, Board, arm_root
from tests.soak.world import SLEEP, World

pytestmark = [pytest.mark.slow, pytest.mark.broker]
DAY_END_S = 600.0
HEADS = {"a": "logistic", "b": "nearest"}
ON_ARM = {"arm": "cosine"}


class Life:
    """The boards in their world, with `on_arm` an emulated one, too; each method is one thing that happens on a day."""

    def __init__(self, folder: Path, days: int, stack: ExitStack, on_arm: bool) -> None:
        self.folder, self.days, self._stack = folder, days, stack
        # a day more, because the clocks of the boards jump ahead before the first renewal is due in a short life
        names = (*HEADS, *ON_ARM) if on_arm else tuple(HEADS)
        self.world = World(folder / "world", names, life_days=days + 1)
        factory = agents.factory(folder / "installation", hook=SLEEP)
        port = self.world.port
        self.boards = [Board(name, folder / name, factory, port, head) for name, head in HEADS.items()]
        if on_arm:
            root = arm_root(folder / "arm")
            for name, head in ON_ARM.items():
                self.boards.append(ArmBoard(name, root / "var/lib/board", root / SITE, port, head, root))
        self.release = self.agent = 0
        self.albums = {
            board.name: Album(board.pictures, seed, time.time()) for seed, board in enumerate(self.boards)
        }
        self.disk = stack.enter_context(Disk(folder / "disk.img", self.boards[0].home, 64))
        self.world.start()
        stack.callback(self.world.stop)
        for board in self.boards:
            board.enrol(self.world.identity(board.name))
            stack.callback(board.kill)
            board.service.start()
        self.publish()

    # what happens

    def publish(self) -> None:
        """The operator releases another extractor."""
        self.release += 1
        model = ("--model", "cnn-tiny", "--size", str(16 + 4 * self.release))
        self.world.edge_fl("release", "publish", *model, "--classes", ",".join(CLASSES), *self.world.operator)

    def update_agents(self) -> None:
        """The operator releases another version of the agent."""
        self.agent += 1
        wheel = agents.wheel(self.folder / "wheels", f"0.2.{self.agent}")
        self.world.edge_fl("release", "agent", str(wheel), *self.world.operator)

    def cut_the_power(self) -> None:
        """All boards lose their power; the disk of the first loses what was not written to it."""
        for board in self.boards:
            board.kill()
        self.disk.cut()
        for board in self.boards:
            board.service.start()

    def restart(self) -> None:
        """All boards restart in order."""
        for board in self.boards:
            board.stop()
            board.service.start()

    def fill_the_disk(self) -> None:
        """The first board's disk is full while pictures come, and has room again."""
        filler = self.boards[0].home / "filler"
        fill(str(filler))
        self.albums["a"].add(4)
        time.sleep(8)
        self.boards[0].service.require_alive()
        filler.unlink()

    def lose_the_clock(self) -> None:
        """All boards restart with a clock that is years behind, and then learn the time."""
        for board in self.boards:
            board.kill()
            board.calendar.set(-2000)
            board.service.start()
        time.sleep(5)

    def jump_ahead(self) -> None:
        """The clocks of running boards jump a day ahead, and back at the end of the day."""
        for board in self.boards:
            board.calendar.set(self.world.calendar.days + 1)

    def kill_server_and_broker(self) -> None:
        """The server's computer loses its power."""
        self.world.server.kill()
        self.world.broker.kill()
        self.world.broker.start()
        self.world.server.start()

    def reset(self) -> None:
        """The owner of the second board resets it."""
        board = self.boards[1]
        board.stop()
        board.run("device", "reset", "--dir", board.inside(board.home), "--yes")
        board.service.start()

    # the days

    def events(self) -> dict[int, list[Callable[[], None]]]:
        """What happens on which day, besides the changes of the pictures."""
        tenths: dict[float, Callable[[], None]] = {
            1: self.cut_the_power,
            2: self.publish,
            3: self.update_agents,
            4: self.fill_the_disk,
            4.5: self.lose_the_clock,
            5: self.world.move_broker,
            5.5: self.jump_ahead,
            6: self.publish,
            7: self.update_agents,
            7.5: self.kill_server_and_broker,
            8: self.world.move_server,
            9: self.reset,
        }
        planned: dict[int, list[Callable[[], None]]] = {}
        for tenth, happens in tenths.items():
            planned.setdefault(ceil(tenth * self.days / 10), []).append(happens)
        for day in range(3, self.days, 13):  # a long life has many restarts
            planned.setdefault(day, []).append(self.restart if day % 2 else self.cut_the_power)
        return planned

    def change_pictures(self, day: int) -> None:
        """People add, delete, rename, move and damage pictures."""
        for shift, album in enumerate(self.albums.values()):
            changes = (
                lambda album=album: album.add(5),
                album.rename,
                lambda album=album: album.remove(4),
                album.corrupt,
                album.relabel,
                lambda album=album: album.add(2),
                album.decompose,
            )
            changes[(day + 3 * shift) % len(changes)]()

    def live(self, day: int) -> None:
        """One day, with what must hold at its end."""
        self.world.calendar.set(day)
        for board in self.boards:
            board.calendar.set(day)
        self.change_pictures(day)
        for happens in self.events().get(day, []):
            happens()
        for board in self.boards:
            board.calendar.set(day)
        for number, board in enumerate(self.boards):
            expected = self.fresh(board, self.folder / f"fresh-{day}-{number}")
            eventually(
                lambda board=board, expected=expected: self.serves(board, expected),
                f"day {day}: {board.name} serves the head of a fresh device",
                DAY_END_S,
            )
            board.service.require_alive()
            self.albums[board.name].require_unchanged()

    def serves(self, board: Board, expected: StoredHead) -> bool:
        """Whether the board serves this head of the newest release, and the server knows the release."""
        current = Slots(board.home / "release").current()
        if current is None or current.manifest.release != self.release:
            return False
        stored = Store(board.home).head(current.manifest.extractor.sha256)
        if stored is None or stored.fit_key != expected.fit_key or stored.release != self.release:
            return False
        return self.world.served(board.name) == self.release and not list(
            (board.home / "outbox").glob("*.json")
        )

    def fresh(self, board: Board, folder: Path) -> StoredHead:
        """The head of a device that sees these pictures and this release for the first time."""
        eventually(
            lambda: (
                (found := Slots(board.home / "release").current()) is not None
                and found.manifest.release == self.release
            ),
            f"{board.name} installs release {self.release}",
            DAY_END_S,
        )
        given = {"id": board.name, "data": str(board.pictures), "folder": str(folder), "head": board.head}
        config = settings.convert(given, board.name)
        shutil.copytree(board.home / "release", folder / "release")
        worker = HeadWorker(
            board.name,
            Store(folder),
            FitSettings(
                config.head,
                budget_s=config.head_budget_s,
                calibrate=True,
                cross_validate_below=config.cross_validate_below,
            ),
            loader=LocalFeatureLoader(streamer(config), folder),
            fitter=fit_here,
            runtime=runtime,
        )
        worker.boot()
        finished = worker.perform(Fit(Assignment(1, "serve", release=self.release), "fresh", 0), None)
        assert isinstance(finished, Finished), finished
        extractor = Slots(folder / "release").current()
        assert extractor is not None
        stored = Store(folder).head(extractor.manifest.extractor.sha256)
        assert stored is not None
        return stored


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def live(folder: Path, days: int, stack: ExitStack, *, on_arm: bool) -> None:
    life = Life(folder, days, stack, on_arm)
    began_s = time.monotonic()
    for day in range(1, days + 1):
        life.live(day)
    assert life.release == 3 and life.agent == 2
    sys.stderr.write(f"{days} days in {time.monotonic() - began_s:.0f} s\n")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_days(tmp_path: Path, stack: ExitStack) -> None:
    live(tmp_path, 3, stack, on_arm=False)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_days(tmp_path: Path, stack: ExitStack) -> None:
    require()
    live(tmp_path, 100, stack, on_arm=True)
