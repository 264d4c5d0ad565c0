"""The configuration says what docs/protocol.md requires, in the syntax of the mosquitto version."""

from pathlib import Path

import pytest

from edge_fl.errors import ConfigError, ProtocolError
from edge_fl.wire.topics import Topics, access_rules
from edge_fl.wire.transport import LIMITS
from edge_fl_broker.config import BrokerSettings, Certificates, render, render_access
from edge_fl_broker.find import Program

OLD = Program(Path("/usr/sbin/mosquitto"), (2, 0, 11))
CERTIFICATES = Certificates(Path("/pki/ca.pem"), Path("/pki/broker.pem"), Path("/pki/broker.key"))


def options(text: str) -> dict[str, str]:
    """Option -> value; a repeated option would hide the first, so there must be none."""
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    names = [name for name, _, _ in lines if name != "log_type"]
    assert len(set(names)) == len(names)
    return {name: value for name, _, value in lines}


@pytest.fixture
def new(tmp_path: Path) -> Program:
    """A mosquitto 2.1 with its plugins in a neighbouring folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/mosquitto_acl_file.so").touch()
    return Program(tmp_path / "sbin/mosquitto", (2, 1, 0))


def test_plaintext_is_for_anybody_on_loopback(tmp_path: Path) -> None:
    found = options(render(BrokerSettings(tmp_path, port=1999), OLD))
    assert found["listener"] == "1999 127.0.0.1"
    assert found["allow_anonymous"] == "true"
    assert "acl_file" not in found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "broker.local"])
def test_plaintext_anywhere_else_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="listens on loopback only"):
        BrokerSettings(tmp_path, host)
    BrokerSettings(tmp_path, host, certificates=CERTIFICATES)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_has_many_names(tmp_path: Path, host: str) -> None:
    assert BrokerSettings(tmp_path, host).host == host


def test_a_fleet_name_invalid_in_a_topic_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="'a/#'"):
        BrokerSettings(tmp_path, fleet="a/#")


def test_with_certificates_clients_are_identified_by_them(tmp_path: Path) -> None:
    found = options(render(BrokerSettings(tmp_path, "0.0.0.0", 8883, certificates=CERTIFICATES), OLD))
    expected = {
        "listener": "8883 0.0.0.0",
        "cafile": "/pki/ca.pem",
        "certfile": "/pki/broker.pem",
        "keyfile": "/pki/broker.key",
        "tls_version": "tlsv1.2",
        "require_certificate": "true",
        "use_identity_as_username": "true",
        "use_username_as_clientid": "true",
        "allow_anonymous": "false",
        "acl_file": str(tmp_path / "access"),
    }
    assert expected.items() <= found.items()


def test_version_2_1_reads_the_access_list_by_a_plugin(tmp_path: Path, new: Program) -> None:
    found = options(render(BrokerSettings(tmp_path, certificates=CERTIFICATES), new))
    assert found["plugin"] == str(new.path.parents[1] / "lib/mosquitto_acl_file.so")
    assert found["plugin_opt_acl_file"] == str(tmp_path / "access")
    assert "acl_file" not in found


def test_version_2_1_without_its_plugins_reads_it_as_before(tmp_path: Path) -> None:
    found = options(
        render(
            BrokerSettings(tmp_path, certificates=CERTIFICATES),
            Program(Path("/opt/none/sbin/mosquitto"), (2, 1, 0)),
        )
    )
    assert found["acl_file"] == str(tmp_path / "access")
    assert "plugin" not in found


def test_a_revocation_list_is_read_when_there_is_one(tmp_path: Path) -> None:
    revoking = Certificates(*(Path("/pki") / name for name in ("ca.pem", "b.pem", "b.key", "revoked.pem")))
    assert (
        options(render(BrokerSettings(tmp_path, certificates=revoking), OLD))["crlfile"] == "/pki/revoked.pem"
    )


def test_the_broker_takes_what_a_transport_sends(tmp_path: Path) -> None:
    found = options(render(BrokerSettings(tmp_path), OLD))
    assert int(found["max_packet_size"]) >= LIMITS.max_packet_bytes
    assert int(found["max_queued_messages"]) > 0, "0 loses messages before version 2.0.22"
    assert found["set_tcp_nodelay"] == "true"
    assert found["persistence"] == "true"


def sections(text: str) -> dict[str, set[str]]:
    """Lines by user; "" applies to all."""
    found: dict[str, set[str]] = {"": set()}
    user = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("user "):
            user = line.removeprefix("user ")
            assert user not in found
            found[user] = set()
        elif not line.startswith("#"):
            found["" if line.startswith("pattern ") else user].add(line)
    return found


def test_the_access_list_is_the_rules_of_the_topics_and_nothing_else() -> None:
    root = Topics("mill").root
    found = sections(
        render_access(BrokerSettings(Path(), fleet="mill", named=("claim-1", "viewer-ann"), denied=("pi-9",)))
    )
    everybody = {
        f"pattern {right} {topic}" for role, right, topic in access_rules("mill") if role == "device"
    }
    assert found.pop("") == everybody
    assert found == {
        "server": {f"topic readwrite {root}/#"},
        "reader": {f"topic read {root}/#"},
        "operator": {
            f"topic read {root}/#",
            *(f"topic read homeassistant/{each}/+/#" for each in ("sensor", "update")),
        }
        | {f"topic read {root}/{each}" for each in ("srv/#", "tuf/#", "d/+/dn/assignment")}
        | {f"topic read {root}/d/+/up/{each}" for each in ("state", "meta", "log")}
        | {f"topic write {root}/{each}" for each in ("srv/#", "tuf/#", "art/#", "d/+/dn/#", "d/+/dn/cmd")}
        | {f"topic read {root}/d/+/up/query/#", f"topic write {root}/d/+/dn/query"},
        "registrar": {f"topic readwrite {root}/enroll/#"},
        "viewer-ann": {
            *(f"topic read {root}/{each}" for each in ("srv/#", "tuf/#", "d/+/dn/assignment")),
            *(f"topic read {root}/d/+/up/{each}" for each in ("state", "meta", "log")),
            *(f"topic deny {root}/{each}/#" for each in ("art", "round", "enroll", "d/viewer-ann")),
            *(f"topic read homeassistant/{each}/+/#" for each in ("sensor", "update")),
            *(f"topic deny homeassistant/{each}/viewer-ann/#" for each in ("sensor", "update")),
        },
        "claim-1": {f"topic deny {root}/{family}/#" for family in ("srv", "tuf", "art", "round", "d")}
        | {f"topic deny homeassistant/{each}/+/#" for each in ("sensor", "update")},
        "pi-9": {"topic deny #"},
    }
