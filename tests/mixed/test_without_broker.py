"""New labels are in the head while the broker is gone, also after kill -9 and a restart, and one report is sent once it is back.

The agent and the label page are the commands, each in a process of its own, with a real mosquitto.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto, free_port
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_maker.access import HEADER
from edge_fl_server.release.repository import Repository
from tests.devices.scripted import TOPICS, ScriptedServer
from tests.maker.labelling.fruit import CLASSES, fruit, manifest, name_of

pytestmark = pytest.mark.broker
DEVICE = "pi-alone"
FOLDER_S, PAGE_S, WAIT_S = 30.0, 3.0, 60.0
"""How soon a new label has to be in the head: dropped into a folder, given on the page."""
QUICK = "watch_s = 0.5\n"


def eventually(holds: Callable[[], object], what: str, deadline_s: float = WAIT_S) -> float:
    """Wait -> seconds until it held."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() < began_s + deadline_s, what
        time.sleep(0.05)
    return time.monotonic() - began_s


@dataclass
class Board:
    """A board with the commands as services."""

    folder: Path
    port: int
    settings: str

    @property
    def home(self) -> Path:
        return self.folder / "pi"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @contextmanager
    def running(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command of the device; at the end the power is cut."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "edge_fl", "device", *command], stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def agent(self) -> Any:
        file = self.folder / "device.toml"
        file.write_text(
            f'id = "{DEVICE}"\ndata = "{self.folder}/images"\nfolder = "{self.home}"\ntier = "head"\n{self.settings}'
            f'[broker]\nhost = "127.0.0.1"\nport = {self.port}\nfleet = "{TOPICS.fleet}"\n'
        )
        return self.running("run", "--config", str(file))

    def drop(self, label: int, *numbers: int) -> None:
        """Put pictures into the folder of a class."""
        folder = self.folder / "images" / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (folder / f"{number}.png").write_bytes(fruit(label, number))

    def fitted(self) -> int:
        """How many pictures the agent's head is fitted on."""
        (stored,) = Store(self.home).heads() or [None]
        return stored.parcel.report.samples if stored else 0

    def outbox(self) -> list[str]:
        return [parcel.report.id for parcel in Store(self.home).outbox()]


def installed(board: Board, broker: Mosquitto, server: ScriptedServer) -> None:
    """Let the device install a release and fit its first head, on two classes."""
    board.drop(0, 0, 1)
    board.drop(1, 0, 1)
    release, payload = manifest()
    server.release(Repository(board.folder / "server"), release, payload)
    with board.agent():
        server.wait_for(DEVICE, "meta")
        server.assignment(DEVICE, "serve", run_id="toy", round=1, id="rel-1", release=1)
        assert server.wait_for(DEVICE, "rpt").samples == 4
        server.ack(DEVICE, "rel-1")
        eventually(lambda: not board.outbox(), "the acknowledgement")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def broker(mosquitto_program: Program, tmp_path: Path, stack: ExitStack) -> Mosquitto:
    settings = BrokerSettings(tmp_path / "mosquitto", port=0)
    return stack.enter_context(Mosquitto(settings, mosquitto_program, lambda line: None))


def scripted(broker: Mosquitto) -> ScriptedServer:
    server = ScriptedServer(partial(MqttTransport, broker.endpoint, session_expiry_s=0), "alone-server")
    server.online()
    return server


@pytest.mark.long
def test_labels_are_learned_while_the_broker_is_gone_and_one_report_is_sent_when_it_is_back(
    broker: Mosquitto, tmp_path: Path
) -> None:
    board, server = Board(tmp_path, broker.settings.port, QUICK), scripted(broker)
    installed(board, broker, server)
    with board.agent():
        server.wait_for(
            DEVICE, "state", lambda state: state.status == "ready" and state.activity == "idle", 3
        )
        broker.kill()
        board.drop(2, 0, 1)
        eventually(lambda: board.fitted() == 6, "a head on the new pictures", FOLDER_S)
    board.drop(3, 0, 1)  # kill -9; then a start without a broker
    with board.agent():
        eventually(lambda: board.fitted() == 8, "a head on what was added while no agent ran", FOLDER_S)
        board.drop(4, 0, 1)
        eventually(lambda: board.fitted() == 10, "a head on the newest pictures", FOLDER_S)
        eventually(lambda: len(board.outbox()) == 1, "one report of all fits")
        (last,) = board.outbox()
        assert last.startswith("refit-") and Predictor(board.home).head.classes == len(CLASSES)
    with board.agent():
        time.sleep(1.0)
        assert board.outbox() == [last], "a restart makes neither a fit nor another report"
        server.transport.close()
        broker.restart()
        server = scripted(broker)
        again = server.wait_for(DEVICE, "rpt")
        assert (again.id, again.samples, again.release, again.error) == (last, 10, 1, "")
        server.ack(DEVICE, last)
        eventually(lambda: not board.outbox(), "the acknowledgement")
        time.sleep(1.0)
    assert [report.id for report in server.messages(DEVICE, "rpt")] == [last]
    server.leave()
    assert "Traceback" not in board.log


def test_an_agent_that_never_met_a_broker_fits_on_an_installed_release(
    broker: Mosquitto, tmp_path: Path
) -> None:
    """The release was installed before anything was labelled; then the board starts where no broker is."""
    board, server = Board(tmp_path, broker.settings.port, QUICK), scripted(broker)
    (tmp_path / "images").mkdir()
    release, payload = manifest()
    server.release(Repository(tmp_path / "server"), release, payload)
    with board.agent():
        server.assignment(DEVICE, "serve", run_id="toy", round=1, id="rel-1", release=1)
        assert server.wait_for(DEVICE, "rpt").error == "no_labels"
        server.ack(DEVICE, "rel-1")
        eventually(lambda: not board.outbox(), "the acknowledgement")
    server.leave()
    board.port = free_port("127.0.0.1")
    board.drop(0, 0, 1)
    board.drop(1, 0, 1)
    with board.agent():
        eventually(lambda: board.fitted() == 4, "a first head", FOLDER_S)


def view(port: int) -> dict[str, Any]:
    return request(port, "GET", "/api/label/view?client=me")


def request(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, msgspec.json.encode(body) if body else None, {HEADER: "label"})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, content
        return msgspec.json.decode(content)
    finally:
        connection.close()


def learned(port: int) -> bool:
    return not view(port)["busy"]


def reachable(port: int) -> bool:
    try:
        view(port)
    except OSError:
        return False
    return True


@pytest.mark.timed
def test_the_label_page_learns_without_a_broker_from_its_start(broker: Mosquitto, tmp_path: Path) -> None:
    board, server = Board(tmp_path, broker.settings.port, QUICK), scripted(broker)
    installed(board, broker, server)
    server.leave()
    broker.kill()
    pool = board.home / "unlabelled"
    pool.mkdir(exist_ok=True)
    truth = {name_of(fruit(2, number)): CLASSES[2] for number in range(10, 16)}
    for number in range(10, 16):
        (pool / name_of(fruit(2, number))).write_bytes(fruit(2, number))
    labelled = 0
    for agent in (
        False,
        True,
    ):  # the page alone, and next to an agent without a broker; both were killed before
        port = free_port("127.0.0.1")
        with ExitStack() as services:
            if agent:
                services.enter_context(board.agent())
            services.enter_context(board.running("serve", "--dir", str(board.home), "--port", str(port)))
            eventually(partial(reachable, port), "the page")
            eventually(partial(learned, port), "the features")
            for _ in range(2):
                shown = view(port)["item"]
                body = {"client": "me", "name": shown["name"], "version": shown["version"]}
                request(port, "POST", "/api/label/label", {**body, "class_name": truth[shown["name"]]})
                labelled += 1
                took_s = eventually(partial(learned, port), "the label is learned")
                assert took_s < PAGE_S
    with board.agent():
        eventually(lambda: board.fitted() == 4 + labelled, "the agent's own head", FOLDER_S)


@pytest.mark.timed
def test_with_default_settings_a_new_picture_is_in_the_head_within_30_s_also_after_a_restart(
    broker: Mosquitto, tmp_path: Path
) -> None:
    board, server = Board(tmp_path, broker.settings.port, ""), scripted(broker)
    installed(board, broker, server)
    server.leave()
    with board.agent():
        time.sleep(3.0)
        broker.kill()
        for number in range(3):
            board.drop(2, number)
            eventually(lambda number=number: board.fitted() == 5 + number, "a head", FOLDER_S)
    with board.agent():
        time.sleep(5.0)
        board.drop(3, 0)
        eventually(lambda: board.fitted() == 8, "a head after a restart", FOLDER_S)
