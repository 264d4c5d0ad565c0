"""An operator asks devices for logs and diagnostics over a real mosquitto with certificates."""

import base64
import json
import logging
import shutil
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edge_fl.blob import describe
from edge_fl.cli import main
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, InputError, RunError, TrustError
from edge_fl.failures import Failure
from edge_fl.secure import signatures
from edge_fl.wire.egress import ANSWERS, SETTINGS
from edge_fl.wire.messages import (
    Capability,
    DeviceState,
    LogLine,
    Logs,
    Query,
    QueryReply,
    answer_content,
    encode,
)
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import UNTYPED, Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register_sync import RegisterSync
from edge_fl_devices.agent.effects import Job
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.agent.state import AgentLimits, AgentState
from edge_fl_devices.config import DeviceBroker, DeviceConfig
from edge_fl_devices.remote import answering
from edge_fl_devices.remote.answering import Deliver, QueryAnswered, Responder
from edge_fl_devices.remote.log_file import LogFile, recording
from edge_fl_devices.runtime.connection import connector as device_connector
from edge_fl_devices.runtime.device import Device, Services
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Worker
from edge_fl_server.mqtt.connector import fleet_authorities, operator_connector, sole_user
from edge_fl_server.mqtt.devices import queries
from tools.memory_broker import InMemoryBroker, InMemoryTransport

pytestmark = pytest.mark.broker
TOPICS = Topics("main")
LOGS = Query("none", "logs")
NEW = Capability("head", "test", "3")
log = logging.getLogger("edge_fl_devices.test")


class Idle(Worker):
    """A worker without work."""

    def perform(self, job: Job, material: Any) -> Event:
        return Failed(Failure.UNSUPPORTED_TIER)


@dataclass
class Site:
    """A broker with certificates, and the identities of its clients."""

    folder: Path
    authority: Authority
    sync: RegisterSync
    port: int
    asked: list[bytes] = field(default_factory=list)  # the queries that devices have taken up

    @property
    def operator(self) -> Path:
        return self.authority.home / "operator"

    def config(self, name: str, **settings: Any) -> DeviceConfig:
        broker = DeviceBroker("127.0.0.1", self.port, "main", str(self.folder / "ids" / name))
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        data = f"folder:{self.folder}/secret pictures"
        return DeviceConfig(
            name, data, folder=str(folder), broker=broker, mirror="http://me:hunter2@x", **settings
        )

    @contextmanager
    def device(self, name: str, capability: Capability = NEW, **settings: Any) -> Iterator[Runner]:
        """Run an agent; `running` in it once it is connected."""
        config = self.config(name, **settings)
        identity = Path(config.broker.identity)
        file = LogFile(Path(config.folder), name)
        worker = Idle(name, Store(Path(config.folder)))
        responder = Responder(config, file, identity)

        def answer(query: bytes, state: AgentState, deliver: Deliver) -> None:
            self.asked.append(query)
            responder.receive(query, state, deliver)

        agent = Device(
            name,
            TOPICS,
            capability,
            worker,
            limits=AgentLimits(settle_s=0.05),
            identity=identity,
            services=Services(answer),
        )
        runner = Runner()
        with worker.store.owned(), recording(file):
            runner.add(agent, device_connector(config.broker.endpoint, "main"))
            thread = threading.Thread(target=partial(runner.run, deadline_s=1000), daemon=True)
            thread.start()
            try:
                agent.connection.wait(60)
                yield runner
            finally:
                runner.stop()
                thread.join(90)

    def ask(self, name: str, query: Query = LOGS, deadline_s: float = 60.0) -> queries.QueryAnswer:
        connect, authorities = (
            operator_connector("127.0.0.1", self.port, self.operator),
            fleet_authorities(self.operator),
        )
        return queries.ask(connect, "main", name, query, authorities, deadline_s=deadline_s)

    def publish(self, *packets: Packet) -> None:
        """Publish as the operator."""
        endpoint = operator_connector("127.0.0.1", self.port, self.operator)
        transport = endpoint("operator-x", None, lambda event: None)
        transport.wait_connected(60)
        for packet in packets:
            transport.publish(packet)
        transport.drain(60)
        transport.close()


@pytest.fixture(scope="module")
def site(mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("queries")
    authority = Authority.make(folder / "home")
    names = [f"pi-{number:02}" for number in range(1, 9)]
    authority.bake({name: folder / "ids" / name for name in names})
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = BrokerSettings(folder / "mosquitto", port=0, certificates=certificates)
    with Mosquitto(register_sync.with_register(settings, authority), mosquitto_program) as broker:
        yield Site(folder, authority, RegisterSync(broker, authority), broker.settings.port)


def command(site: Site, *words: str) -> int:
    return main(
        [
            *words,
            "--port",
            str(site.port),
            "--identity",
            str(site.operator),
            "--home",
            str(site.folder / "none"),
        ]
    )


def test_an_operator_reads_the_log_of_a_device(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with site.device("pi-01"):
        log.warning("pi-01: %s", RunError("the canary failed"))
        log.warning("no_data: %s", InputError("/srv/anna/beach.jpg: damaged"))
        answer = site.ask("pi-01")
        assert answer.signed and isinstance(answer.content, Logs)
        texts = [line.text for line in answer.content.lines]
        assert {"init, idle", "the canary failed", "no_data: InputError"} <= {*texts}
        assert b"anna" not in answer.payload
        warnings = site.ask("pi-01", replace_query(level="warning")).content
        assert isinstance(warnings, Logs)
        assert {line.level for line in warnings.lines} == {"warning"}
        old = site.ask("pi-01", replace_query(until_s=3600.0)).content
        assert isinstance(old, Logs) and not old.lines
        assert (
            command(
                site, "device", "logs", "pi-01", "--level", "warning", "--since", "1h", "--format", "json"
            )
            == 0
        )
        shown = capsys.readouterr()
        assert [row["text"] for row in json.loads(shown.out)] == [line.text for line in warnings.lines]
        assert shown.err == f"pi-01: {len(warnings.lines)} lines; signed with the certificate of pi-01\n"


def replace_query(**fields: Any) -> Query:
    return msgspec.structs.replace(LOGS, **fields)


def test_a_long_log_comes_in_chunks_and_says_what_did_not_fit(site: Site) -> None:
    with site.device("pi-01"):
        for number in range(1200):
            log.warning("pi-01: line %d %s", number, "x" * 200)
        answer = site.ask("pi-01")
    assert isinstance(answer.content, Logs) and answer.reply.blob
    assert len(answer.reply.blob.chunks) >= 3 and len(answer.payload) <= 256 * 1024
    texts = [line.text for line in answer.content.lines if line.text.startswith("line ")]
    assert texts[-1].startswith("line 1199 ")


def test_a_signed_bundle_holds_what_the_egress_rules_list(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "pi-02.zip"
    with site.device("pi-02", latency_ms=99.0, classes=["anna"]):
        log.error("pi-02: something failed")
        assert command(site, "device", "diagnose", "pi-02", "--out", str(out)) == 0
        assert command(site, "device", "diagnose", "pi-02", "--out", str(out)) == 4  # never overwritten
    assert out.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(out) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    tree = json.loads(files["diagnostics.json"])
    assert set(tree) == set(ANSWERS["diagnostics"])
    assert set(tree["settings"]) <= set(SETTINGS) and tree["settings"]["latency_ms"] == 99.0
    assert not any(word in files["diagnostics.json"] for word in (b"secret pictures", b"hunter2", b"anna"))
    assert [line["text"] for line in tree["errors"]] == ["something failed"] and b"something" in files[
        "errors.txt"
    ]
    states = {check["check"]: check["state"] for check in tree["checks"]}
    assert states["TLS"] == states["certificate"] == "ok" and "data" not in states
    signed = json.loads(files["signature.json"])
    certificate = x509.load_pem_x509_certificate(signed.pop("certificate").encode())
    signature = base64.b64decode(signed.pop("signature"))
    assert signed["sha256"] == describe(files["diagnostics.json"]).sha256
    der = certificate.public_bytes(Encoding.DER)
    signatures.require_signed(der, "pi-02", signed, signature, fleet_authorities(site.operator))


def test_a_device_that_is_not_connected_or_not_known_is_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.device("pi-03"):
        pass
    assert command(site, "device", "logs", "pi-03") == 2
    assert (
        "pi-03: not connected (disconnected), so it cannot answer; nothing was read"
        in capsys.readouterr().err
    )
    assert command(site, "device", "logs", "pi-99") == 4
    assert "no device 'pi-99'" in capsys.readouterr().err


def test_a_revoked_device_gives_no_answer(site: Site) -> None:
    with site.device("pi-05"):
        assert site.ask("pi-05").signed
        site.authority.revoke("pi-05")
        site.sync.update()
        with pytest.raises((DeadlineError, ConnectError)) as caught:
            site.ask("pi-05", deadline_s=1.5)
    assert "pi-05: " in str(caught.value)


def test_the_owner_can_switch_it_off(site: Site) -> None:
    with (
        site.device("pi-06", remote_logs=False),
        pytest.raises(RunError, match="owner has switched off the setting remote_logs"),
    ):
        site.ask("pi-06")


def test_a_device_bounds_the_rate_of_its_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "time", SimpleNamespace(monotonic=lambda: 0.0))  # all in one minute
    with site.device("pi-07"):
        for _ in range(answering.MAX_ANSWERS):
            site.ask("pi-07")
        with pytest.raises(RunError, match="at most 6 queries per minute"):
            site.ask("pi-07")
        site.publish(
            *(Packet(TOPICS.down("pi-07", "query"), encode(Query(f"flood-{n}", "logs"))) for n in range(20))
        )
        with pytest.raises(DeadlineError):
            site.ask("pi-07", deadline_s=1.5)


def test_oversized_malformed_and_retained_queries_are_ignored(site: Site) -> None:
    topic = TOPICS.down("pi-08", "query")
    # Before the device subscribes: to subscribers the broker delivers a message that is to be retained like any other.
    site.publish(Packet(topic, encode(Query("kept", "logs")), retain=True))
    with site.device("pi-08"):
        site.ask("pi-08")  # it has subscribed
        site.publish(
            Packet(topic, b'{"id":"big","what":"logs","level":"' + b"x" * 280_000 + b'"}'),
            Packet(topic, b'{"id":"big","what":"logs","max_bytes":1000000000}'),
            Packet(topic, b'{"id":"x","what":"shell"}'),
        )
        found = site.ask("pi-08").content
    assert isinstance(found, Logs)
    assert sum("Query" in line.text for line in found.lines if line.level == "warning") == 3
    assert not any(b'"kept"' in query for query in site.asked)
    site.publish(Packet(topic, b"", retain=True))


def test_who_has_an_answer_may_ask_again_at_once(site: Site) -> None:
    config = site.config("pi-08")
    responder = Responder(config, LogFile(Path(config.folder), "pi-08"))
    state = AgentState("pi-08", "boot", TOPICS, NEW)
    reasons, answered = list[str](), threading.Event()

    def deliver(answer: QueryAnswered) -> None:
        reasons.append(answer.reply.reason)
        if len(reasons) == 1:
            responder.receive(encode(Query("next", "logs")), state, deliver)
        else:
            answered.set()

    responder.receive(encode(LOGS), state, deliver)
    assert answered.wait(60) and reasons == ["", ""]


def test_two_operators_on_one_machine_ask_one_after_the_other(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have the identity next to the CA, for which the broker keeps one connection."""
    with site.device("pi-01"), ThreadPoolExecutor(1) as other:
        with sole_user(site.operator, 60, pytest.fail), redirect_stderr(StringIO()) as said:
            waits = other.submit(command, site, "device", "logs", "pi-01", "--wait", "60")
            while "waiting for another command with the identity operator" not in said.getvalue():
                assert not waits.done(), said.getvalue()
            assert site.ask("pi-01").signed  # not interrupted
        assert waits.result(60) == 0
        with sole_user(site.operator, 60, pytest.fail):
            assert command(site, "device", "logs", "pi-01", "--wait", "1") == 2
        assert "another command has used the identity operator for 1 s" in capsys.readouterr().err


def test_two_operators_on_two_machines_both_get_their_answers(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one identity: the broker ends the first connection for the second, and neither may go on doing that to the other."""
    monkeypatch.setattr(queries, "PAUSE_S", (1.0, 3.0))
    shutil.copytree(site.operator, copy := tmp_path / "operator")
    first, second = threading.Event(), threading.Event()
    lines: list[str] = []

    def connector(folder: Path, connected: threading.Event, until: threading.Event) -> Any:
        connect = operator_connector("127.0.0.1", site.port, folder)

        def connect_and_wait(*arguments: Any, **options: Any) -> Any:
            transport = connect(*arguments, **options)
            transport.wait_connected(60)
            connected.set()
            assert until.wait(60)
            return transport

        return connect_and_wait

    def ask(name: str, connect: Any) -> bool:
        cas = fleet_authorities(site.operator)
        return queries.ask(connect, "main", name, LOGS, cas, deadline_s=100, notify=lines.append).signed

    with site.device("pi-02"), site.device("pi-03"), ThreadPoolExecutor(2) as both:
        one = both.submit(ask, "pi-02", connector(site.operator, first, second))
        assert first.wait(60)
        other = both.submit(ask, "pi-03", connector(copy, second, second))
        assert one.result(110) and other.result(110)
    assert lines[0].startswith("pi-02: the connection was ended (") and "using the same identity" in lines[0]


def test_only_the_operator_may_ask(site: Site) -> None:
    for folder in (site.authority.home / "server", site.folder / "ids" / "pi-01"):
        with pytest.raises(ConfigError, match="expected that of an operator"):
            operator_connector("127.0.0.1", site.port, folder)


@pytest.mark.parametrize("forgery", ["unsigned", "another device", "another query", "changed"])
def test_a_forged_answer_is_not_used(site: Site, forgery: str) -> None:
    """A broker can write anything: here a broker in memory, and a client that answers in the name of pi-01."""
    broker = InMemoryBroker()
    own = signatures.Signer.of(site.folder / "ids" / ("pi-02" if forgery == "another device" else "pi-01"))

    def answer(event: object) -> None:
        if not isinstance(event, Packet) or event.topic != TOPICS.down("pi-01", "query"):
            return
        query = msgspec.json.decode(event.payload, type=Query)
        payload = msgspec.json.encode(Logs([LogLine("2026", "info", "all is well")]))
        signed_id = "other" if forgery == "another query" else query.id
        content = answer_content("main", "pi-01", signed_id, describe(payload).sha256)
        signature = own.sign(content)
        if forgery == "changed":
            payload = payload.replace(b"well", b"ill ")
        reply = QueryReply(query.id, describe(payload), own.certificate, signature)
        if forgery == "unsigned":
            reply = QueryReply(query.id, describe(payload))
        client.publish(Packet(TOPICS.up("pi-01", "query"), encode(reply)))
        client.publish(Packet(TOPICS.up("pi-01", "query", query.id, 0), payload, content_type=UNTYPED))

    client = InMemoryTransport(broker, "forger", None, answer)
    client.subscribe(f"{TOPICS.root}/#")
    client.publish(Packet(TOPICS.up("pi-01", "state"), encode(DeviceState("ready", "boot")), retain=True))
    client.publish(Packet(TOPICS.up("pi-01", "meta"), encode(NEW), retain=True))
    connect: Any = partial(InMemoryTransport, broker)
    with pytest.raises(TrustError, match="the answer of pi-01"):
        queries.ask(connect, "main", "pi-01", LOGS, fleet_authorities(site.operator), deadline_s=60)
    broker.close()
