"""A broker that is under an attacker's control, between a real server and a real device: it can withhold, but neither assign nor lie."""

import threading
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from edge_fl.fields import Tier
from edge_fl.release.agent import AgentUpdate
from edge_fl.secure.signatures import Signer, stated
from edge_fl.wire import identity
from edge_fl.wire.messages import Assignment, Capability, Command, DeviceState, decode
from edge_fl.wire.transport import Packet
from edge_fl_broker.find import Program
from edge_fl_devices.runtime.device import Services
from edge_fl_server.mqtt.connector import LeaseLimits, fleet_authorities
from edge_fl_server.mqtt.devices import device_list
from edge_fl_server.registry import registered_devices
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.director import LIFE_S, Director
from tests.devices.scripted import eventually, running
from tests.mixed.attacked_broker import TOPICS, Scene, scene, serve

__all__ = ["scene"]  # fixture


def forged(scene: Scene) -> Assignment:
    return replace(scene.assignments()[-1], version=2**30, id="rel-1", release=1)


def stripped(scene: Scene) -> Assignment:
    return replace(forged(scene), signature=None)


def replayed(scene: Scene) -> Assignment:
    return next(assignment for assignment in scene.assignments() if assignment.release == 1)


def swapped(scene: Scene) -> Assignment:
    return scene.assignments("pi-02")[-1]


def by_another_key(scene: Scene) -> Assignment:
    thief = Director(Repository(scene.home / "thief"), "main")
    return thief.sign("assignment", "pi-01", stripped(scene))


def expired(scene: Scene) -> Assignment:
    old = Director(scene.repository, "main", clock=lambda: 0.0)
    old._reserve = lambda: 2**52  # type: ignore[method-assign]
    assert LIFE_S < 1e9
    return old.sign("assignment", "pi-01", stripped(scene), lasts=True)


ATTACKS: dict[str, Callable[[Scene], Assignment]] = {
    "forged": forged,
    "unsigned": stripped,
    "replayed": replayed,
    "misdirected": swapped,
    "wrong_key": by_another_key,
    "expired": expired,
}


def test_an_assignment_that_the_server_did_not_sign_for_this_device_now_is_rejected_by_name(
    scene: Scene,
) -> None:
    server, device = scene.server(), scene.device()
    scene.publish(server)
    scene.publish(server)
    serve(server, 1, "pi-02")
    with running(device, connect=scene.connect):
        for release in (1, 2):
            serve(server, release)
            eventually(lambda release=release: device.state.release == release and not device.state.work)
        assert device.state.memory.signed
        for why, attack in ATTACKS.items():
            scene.inject(TOPICS.down("pi-01", "assignment"), attack(scene))
            eventually(lambda why=why: device.state.why == why)
            table = server.roster
            eventually(
                lambda why=why, table=table: (d := table.get("pi-01")) and d.state and d.state.why == why
            )
            assert device.state.release == 2 and device.state.assignment
            assert device.state.assignment.id == "rel-2", why
        server.assignments.assign("pi-01", "serve", run_id="toy", round=1, id="rel-1-again-1", release=1)
        eventually(lambda: device.state.release == 1 and not device.state.why)


def test_commands_and_agent_updates_that_the_server_did_not_sign_do_nothing_and_are_reported(
    scene: Scene,
) -> None:
    updates: list[AgentUpdate | None] = []
    server, device = scene.server(), scene.device(services=Services(desire_update=updates.append))
    director, stranger = server.connection.director, Director(Repository(scene.home / "thief"), "main")
    old = Director(scene.repository, "main", clock=lambda: 0.0)
    old._reserve = lambda: 2**52  # type: ignore[method-assign]
    assert isinstance(director, Director)
    scene.publish(server)
    first, second = AgentUpdate("agent-1", 1), AgentUpdate("agent-2", 2)
    revoke = Command("c-1", "revoke-local-head")
    with running(device, connect=scene.connect):
        serve(server, 1)
        eventually(lambda: device.state.release == 1 and not device.state.work)
        server.assignments.republish("pi-01")  # now the device trusts a root
        eventually(lambda: device.state.memory.signed)
        genuine = director.sign("agent", "pi-01", first), director.sign("agent", "pi-01", second)
        for update in genuine:
            server.connection.publish(TOPICS.down("pi-01", "agent"), update, retain=True)
        eventually(lambda: updates == [*genuine])
        done = director.sign("cmd", "pi-01", revoke, lasts=True)
        server.connection.publish(TOPICS.down("pi-01", "cmd"), done)
        eventually(lambda: device.state.release == 0)
        server.assignments.assign("pi-01", "serve", run_id="toy", round=1, id="rel-1-again-1", release=1)
        eventually(lambda: device.state.release == 1 and not device.state.work)
        again = replace(revoke, id="c-2")
        third = AgentUpdate("agent-3", 1)
        attacks: dict[str, tuple[Command, AgentUpdate | None]] = {
            "unsigned": (again, third),
            "forged": (
                replace(again, signature=done.signature),
                replace(third, signature=genuine[1].signature),
            ),
            "replayed": (done, genuine[0]),
            "misdirected": (director.sign("cmd", "pi-02", again), director.sign("agent", "pi-02", third)),
            "wrong_key": (stranger.sign("cmd", "pi-01", again), stranger.sign("agent", "pi-01", third)),
            "expired": (old.sign("cmd", "pi-01", again, lasts=True), None),
        }
        for why, (command, forgery) in attacks.items():
            scene.inject(TOPICS.down("pi-01", "cmd"), command, retain=False)
            line = f"command {command.id} (revoke-local-head) rejected: {why}"
            eventually(lambda line=line: line in scene.log_lines())
            if forgery:
                scene.inject(TOPICS.down("pi-01", "agent"), forgery)
                line = f"agent update {forgery.id} rejected: {why}"
                eventually(lambda line=line: line in scene.log_lines())
            assert (device.state.release, updates) == (1, [*genuine]), why
        server.connection.publish(
            TOPICS.down("pi-01", "cmd"), director.sign("cmd", "pi-01", again, lasts=True)
        )
        eventually(lambda: device.state.release == 0)


def test_numbers_grow_over_restarts_of_server_and_device_a_new_key_and_a_broker_without_its_data(
    scene: Scene, mosquitto_program: Program
) -> None:
    device = scene.device()
    server = scene.server()
    scene.publish(server)
    with running(device, connect=scene.connect):
        serve(server, 1)
        eventually(lambda: device.state.release == 1)
    first = device.state.memory.signed
    server.connection.close()
    scene.attacker.publish(Packet(TOPICS.server("state"), b"", retain=True))  # the epoch begins anew
    scene.attacker.publish(Packet(TOPICS.down("pi-01", "assignment"), b"", retain=True))
    scene.attacker.drain(60)
    server, device = scene.server(), scene.device()
    assert server.connection.epoch == 1
    scene.repository.rotate("timestamp")
    scene.publish(server)
    with running(device, connect=scene.connect):
        serve(server, 2)
        eventually(lambda: device.state.release == 2)
        assert device.state.memory.signed > first


def test_servers_and_devices_without_signatures_work_with_those_that_have_them_until_the_first_signature(
    scene: Scene,
) -> None:
    older, device = scene.server(signs=False), scene.device()
    scene.publish(older)
    with running(device, connect=scene.connect):
        serve(older, 1)
        eventually(lambda: device.state.release == 1 and not device.state.memory.signed)
        older.connection.close()
        newer = scene.server()
        eventually(lambda: newer.roster.get("pi-01"))
        scene.publish(newer)
        serve(newer, 2)
        eventually(lambda: device.state.release == 2 and device.state.memory.signed)
    sent = msgspec.json.decode(next(p.payload for p in reversed(scene.sent) if "assignment" in p.topic))
    assert {"version", "mode", "id", "release"} <= sent.keys()  # where an older device reads them


def test_a_forged_version_report_is_flagged_and_does_not_count(scene: Scene) -> None:
    server, device = scene.server(), scene.device()
    scene.publish(server)
    topic = TOPICS.up("pi-01", "state")

    def known() -> DeviceState | None:
        found = server.roster.get("pi-01")
        return found.state if found else None

    with running(device, connect=scene.connect):
        server.roster.wait_for(heads=1, deadline_s=90)
        serve(server, 1)
        eventually(lambda: (state := known()) and state.release == 1 and not device.state.work)
        before = next(p for p in scene.sent if p.topic == topic)
        lie = DeviceState("ready", device.state.boot, 10**6, release=9)
        other = Signer.of(scene.home / "ca" / "pi-02")
        lies = {
            "unsigned": lie,
            "forged": stated(lie, other, "main", "pi-01", 2**52),
            "replayed": decode(before.payload, DeviceState),
        }
        for why, message in lies.items():
            scene.inject(topic, message)
            eventually(lambda why=why: why in scene.rejections())
            state = known()
            assert state and state.release == 1, why
        scene.inject(TOPICS.up("pi-01", "meta"), Capability("full", "x", "3", agent="9.9"))
        eventually(lambda: scene.rejections().count("unsigned") == 2)
        roster_device = server.roster.get("pi-01")
        assert roster_device and roster_device.tier is Tier.HEAD
        assert not server.journal.blocked("pi-01")  # it is not the device's fault
        scene.inject(topic, lies["forged"])
        scene.attacker.drain(60)
        cas = fleet_authorities(scene.home / "ca" / "operator")
        rows = device_list.devices(
            scene.connect, "main", scene.db, LeaseLimits(settle_s=1.0), authorities=cas
        ).rows
        assert [row["signed"] for row in rows] == ["forged"]


def test_a_restarted_server_still_demands_signatures_until_the_operator_admits_the_device(
    scene: Scene,
) -> None:
    server, device = scene.server(), scene.device()
    with running(device, connect=scene.connect):
        server.roster.wait_for(heads=1, deadline_s=90)
    eventually(
        lambda: (
            (seen := registered_devices.get(scene.db, "main", "pi-01"))
            and seen.signed_state
            and seen.signed_meta
        )
    )
    server.connection.close()
    server = scene.server()
    older = Capability("head", "x86_64", "3.12", agent="0.9")  # an agent without signatures
    scene.inject(TOPICS.up("pi-01", "meta"), older)
    eventually(lambda: "unsigned" in scene.rejections())
    registered_devices.readmit(scene.db, "main", "pi-01")
    scene.inject(TOPICS.up("pi-01", "meta"), older)
    eventually(lambda: (found := server.roster.get("pi-01")) and found.capability == older)


def test_the_end_of_a_certificate_is_that_of_the_certificate_and_not_what_its_device_says(
    scene: Scene,
) -> None:
    server, device = scene.server(), scene.device()
    with running(device, connect=scene.connect):
        server.roster.wait_for(heads=1, deadline_s=90)
        ends_s = int(identity.read(scene.home / "ca" / "pi-01").expires.timestamp())
        assert device.state.capability.certificate_until != ends_s
        eventually(
            lambda: (
                (seen := registered_devices.get(scene.db, "main", "pi-01"))
                and seen.capability
                and seen.capability["certificate_until"] == ends_s
            )
        )


def test_many_threads_never_sign_with_one_number(scene: Scene) -> None:
    directors = [Director(scene.repository, "main") for _ in range(2)]
    numbers: list[int] = []

    def sign(director: Director) -> None:
        for _ in range(50):
            signature = director.sign("assignment", "pi-01", Assignment(1, "rest")).signature
            assert signature
            numbers.append(signature.number)

    threads = [threading.Thread(target=sign, args=(director,)) for director in directors * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 200


def test_a_message_is_signed_while_the_repository_is_locked(scene: Scene) -> None:
    with scene.repository.locked():
        signed = Director(Repository(scene.repository.folder), "main").sign(
            "assignment", "pi-01", Assignment(1, "rest")
        )
    assert signed.signature
