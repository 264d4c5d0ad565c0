"""The CA issues each certificate once, only to its owner, and never reveals or overwrites a key."""

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from edge_fl.cli import main
from edge_fl.errors import ConfigError
from edge_fl.files.accounts import local_user
from edge_fl.wire import identity
from edge_fl.wire.identity import IdentityError
from edge_fl_broker.provision import certificates
from edge_fl_broker.provision.authority import LIFE, MAX_HOLDING, Authority, RequestRejectedError
from edge_fl_broker.provision.register import denied, named

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authority(tmp_path: Path, clock: Clock) -> Authority:
    return Authority.make(tmp_path / "home", clock)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def revoked_serials(authority: Authority) -> set[str]:
    found = x509.load_pem_x509_crl(authority.revoked_path.read_bytes())
    return {f"{entry.serial_number:x}" for entry in found}


def test_a_second_start_finds_what_the_first_one_made(authority: Authority) -> None:
    before = files(authority.home)
    again = Authority.make(authority.home, authority.now)
    changed = {name for name, content in files(again.home).items() if before.get(name) != content}
    assert changed <= {"revoked.crl"}
    names = [row.name for row in again.register.rows()]
    assert names[:4] == ["server", "reader", "operator", "registrar"] and names[5:] == ["broker"]
    assert names[4].startswith("reader-"), "the operator's second connection"


def test_certificates_begin_a_day_back_and_hold_for_years(authority: Authority, tmp_path: Path) -> None:
    (found,) = authority.bake({"pi-1": tmp_path / "pi-1"})
    assert (found.name, found.role) == ("pi-1", "device")
    assert (found.begins, found.expires) == (NOW - timedelta(days=1), NOW + LIFE)
    assert found.begins < found.renew_at < found.expires
    certificate = x509.load_pem_x509_certificate((found.folder / "client.crt").read_bytes())
    assert certificate.public_key().curve.name == "secp256r1"  # type: ignore[union-attr]


def test_only_the_owner_may_read_a_key(authority: Authority, tmp_path: Path) -> None:
    authority.bake({"pi-1": tmp_path / "pi-1"})
    authority.claim({"pi-2": tmp_path / "pi-2"})
    keys = [*tmp_path.rglob("*.key"), *tmp_path.rglob("token")]
    assert len(keys) == 10
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert {stat.S_IMODE(key.parent.stat().st_mode) for key in keys} == {0o700}


def test_what_is_there_is_never_overwritten(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "pi-1").mkdir()
    for folders in ({"pi-1": tmp_path / "pi-1"}, {"server": tmp_path / "new"}, {"claim-1": tmp_path / "new"}):
        for issue in (authority.bake, authority.claim):
            with pytest.raises(ConfigError, match="nothing was changed"):
                issue(folders)
    authority.bake({"pi-2": tmp_path / "pi-2"})
    with pytest.raises(ConfigError, match=r"'pi-2': has a certificate .* already"):
        authority.claim({"pi-3": tmp_path / "pi-3", "pi-2": tmp_path / "other"})
    assert not (tmp_path / "pi-3").exists(), "one that is taken leaves none of them made"


def test_a_name_whose_folder_cannot_be_made_is_not_taken(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for issue in (authority.bake, authority.claim):
        with pytest.raises(ConfigError, match="expected a writable folder; nothing was changed"):
            issue({"pi-1": tmp_path / "pi-1", "pi-2": tmp_path / "file" / "pi-2"})
    assert not (tmp_path / "pi-1").exists()
    authority.bake({name: tmp_path / name for name in ("pi-1", "pi-2")})


def test_a_claim_is_worth_one_certificate_on_its_device(authority: Authority, tmp_path: Path) -> None:
    (claim,) = authority.claim({"pi-1": tmp_path / "pi-1"})
    assert claim.role == "claim" and claim.token
    assert claim.name in named(authority.register.rows(), NOW)
    key = identity.new_key()
    request = identity.request("pi-1", key)
    for sender, wanted, secret, why in (
        (claim.name, request, "guess", "wrong_token"),
        (claim.name, identity.request("pi-2", key), claim.token.secret, "wrong_name"),
        (claim.name, identity.request("server", key), claim.token.secret, "wrong_name"),
        ("claim-0", request, claim.token.secret, "unknown"),
    ):
        with pytest.raises(RequestRejectedError, match=why):
            authority.answer(sender, wanted, secret)
    authority.answer(claim.name, request, claim.token.secret)
    with pytest.raises(RequestRejectedError, match="used"):
        authority.answer(claim.name, identity.request("pi-1", identity.new_key()), claim.token.secret)
    # a device that lost the answer asks again with the same key
    certificate = authority.answer(claim.name, request, claim.token.secret)
    renewed = identity.replace(claim.folder, certificate, key)
    assert (renewed.name, renewed.token) == ("pi-1", None)
    authority.revoke("pi-1")
    with pytest.raises(RequestRejectedError, match="unknown"):
        authority.answer(claim.name, request, claim.token.secret)
    assert f"{claim.serial:x}" in revoked_serials(authority), "a device's claim ends with it"
    assert not [name for name in named(authority.register.rows(), NOW) if name.startswith("claim-")]
    assert denied(authority.register.rows(), NOW) == ["pi-1"]


def test_a_claim_runs_out(authority: Authority, clock: Clock, tmp_path: Path) -> None:
    (claim,) = authority.claim({"pi-1": tmp_path / "pi-1"})
    clock.now += timedelta(days=31)
    assert claim.token
    with pytest.raises(RequestRejectedError, match="unknown"):
        authority.answer(claim.name, identity.request("pi-1", identity.new_key()), claim.token.secret)


def test_a_device_gets_its_next_certificate_and_no_other_name(authority: Authority, tmp_path: Path) -> None:
    authority.bake({"pi-1": tmp_path / "pi-1"})
    with pytest.raises(RequestRejectedError, match="wrong_name"):
        authority.answer("pi-1", identity.request("pi-2", identity.new_key()))
    for _ in range(MAX_HOLDING - 1):
        key = identity.new_key()
        identity.replace(tmp_path / "pi-1", authority.answer("pi-1", identity.request("pi-1", key)), key)
    with pytest.raises(RequestRejectedError, match="too_many"):
        authority.answer("pi-1", identity.request("pi-1", key))


@pytest.mark.parametrize(
    "request_", [b"", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"]
)
def test_what_is_no_request_is_refused(request_: bytes) -> None:
    with pytest.raises(IdentityError):
        certificates.read_request(request_)


def test_a_revoked_name_stays_denied_until_enrolled_again(authority: Authority, tmp_path: Path) -> None:
    (first,) = authority.bake({"pi-1": tmp_path / "pi-1"})
    authority.revoke("pi-1")
    denied_file = authority.home / "server/denied"
    assert revoked_serials(authority) == {f"{first.serial:x}"}
    assert denied_file.read_text() == "pi-1\n"
    with pytest.raises(ConfigError, match="no valid certificate"):
        authority.revoke("pi-1")
    with pytest.raises(RequestRejectedError, match="unknown"):
        authority.answer("pi-1", identity.request("pi-1", identity.new_key()))
    authority.bake({"pi-1": tmp_path / "again"})
    authority.publish()
    assert revoked_serials(authority) == {f"{first.serial:x}"}
    assert denied_file.read_text() == ""


def test_the_revocation_list_lasts_as_long_as_the_ca(authority: Authority) -> None:
    found = x509.load_pem_x509_crl(authority.revoked_path.read_bytes())
    ca = x509.load_pem_x509_certificate(authority.ca)
    assert found.next_update_utc == ca.not_valid_after_utc
    assert found.is_signature_valid(ca.public_key())  # type: ignore[arg-type]


def test_the_broker_gets_a_new_certificate_for_a_new_host_only(authority: Authority) -> None:
    first = authority.broker(["localhost"])
    assert first.serial == authority.broker().serial
    second = authority.broker(["mill.local", "10.0.0.7"])
    assert second.serial != first.serial
    assert authority.broker(["mill.local"]).serial == second.serial


def test_rotation_leaves_the_old_certificate_valid(authority: Authority, tmp_path: Path) -> None:
    (first,) = authority.bake({"pi-1": tmp_path / "pi-1"})
    key = (first.folder / "client.key").read_bytes()
    second = authority.rotate(first.folder)
    assert second.serial != first.serial and (first.folder / "client.key").read_bytes() != key
    assert len([row for row in authority.register.rows() if row.name == "pi-1" and row.holds(NOW)]) == 2
    with pytest.raises(ConfigError, match="broker up"):
        authority.rotate(authority.home / "broker")


def test_the_commands_show_no_key_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--identities", str(tmp_path)]
    assert main(["fleet", "enrol", "--baked", "--count", "2", *home]) == 0
    assert main(["fleet", "enrol", "pi-7", *home]) == 0
    assert main(["fleet", "rotate", str(tmp_path / "devices/device-000"), *home]) == 0
    assert main(["fleet", "revoke", "device-001", "pi-7", *home]) == 0
    assert main(["fleet", "certificates", "--format", "json", *home]) == 0
    said = capsys.readouterr()
    printed = said.out + said.err
    assert said.err.count("what leaves a device for others: class statistics, in masked sums") == 2
    assert "PRIVATE" not in printed
    assert json.loads((tmp_path / "devices/pi-7/token").read_text())["secret"] not in printed
    table = json.loads(said.out[said.out.index("[\n") :])
    assert [(row["name"], row["state"]) for row in table if row["role"] == "device"] == [
        ("device-000", "valid"),
        ("device-001", "revoked"),
        ("device-000", "valid"),
    ]
    assert main(["fleet", "enrol", "device-000", "--baked", *home]) == 4
    assert main(["fleet", "certificates", "--identities", str(tmp_path / "none")]) == 4


def test_a_person_gets_ninety_days_and_keeps_the_name_when_renewed(
    authority: Authority, clock: Clock, tmp_path: Path
) -> None:
    (ann,) = authority.enrol_people("viewer", ["ann"], tmp_path)
    assert (ann.name, ann.role, ann.expires - NOW) == ("viewer-ann", "viewer", timedelta(days=90))
    with pytest.raises(ConfigError, match=r"viewer-ann.*fleet rotate"):
        authority.enrol_people("viewer", ["ann"], tmp_path / "again")
    for wrong in ({"viewer-bo": tmp_path / "x"}, {"reader-1": tmp_path / "x"}):
        with pytest.raises(ConfigError, match="people: --role"):
            authority.bake(wrong)
    clock.now = NOW + timedelta(days=100)
    assert "viewer-ann" not in named(authority.register.rows(), clock.now)
    renewed = authority.rotate(ann.folder, timedelta(days=7))
    assert (renewed.name, renewed.expires - clock.now) == ("viewer-ann", timedelta(days=7))
    assert "viewer-ann" in named(authority.register.rows(), clock.now)


def test_a_person_cannot_renew_over_mqtt(authority: Authority, tmp_path: Path) -> None:
    authority.enrol_people("viewer", ["ann"], tmp_path)
    request = identity.request("viewer-ann", identity.new_key())
    with pytest.raises(RequestRejectedError, match="wrong_role"):
        authority.answer("viewer-ann", request)


def test_the_second_identity_of_a_releaser_ends_with_the_first(authority: Authority, tmp_path: Path) -> None:
    (bo,) = authority.enrol_people("releaser", ["bo"], tmp_path)
    second = identity.read(bo.folder / "reader")
    assert (second.role, second.expires) == ("reader", bo.expires)
    authority.rotate(bo.folder)
    assert identity.read(bo.folder / "reader").serial != second.serial
    ended = authority.revoke("releaser-bo")
    assert (
        {row.name for row in ended}
        == {"releaser-bo", second.name}
        <= set(denied(authority.register.rows(), NOW))
    )
    assert {row.revoked_by for row in ended} == {local_user()} == {row.issued_by for row in ended}


def test_the_operators_identity_beside_the_ca_is_short_lived_and_renewed(
    authority: Authority, clock: Clock
) -> None:
    folder = authority.home / "operator"
    first, due = identity.read(folder), authority.renew_own()
    assert (first.role, first.expires - NOW, due) == ("admin", timedelta(days=90), first.renew_at)
    clock.now = NOW + timedelta(days=61)
    authority.renew_own()
    renewed = identity.read(folder)
    assert renewed.serial != first.serial
    authority.renew_own()
    assert identity.read(folder) == renewed
    assert identity.read(folder / "reader").expires == renewed.expires


@pytest.mark.parametrize("folder", ["server", "server/reader", "registrar"])
def test_identities_beside_the_ca_are_renewed_before_they_end(
    authority: Authority, clock: Clock, folder: str
) -> None:
    first = identity.read(authority.home / folder)
    clock.now = first.renew_at - timedelta(days=1)
    authority.renew_own()
    assert identity.read(authority.home / folder) == first
    clock.now = first.renew_at
    authority.renew_own()
    assert identity.read(authority.home / folder).expires - clock.now == LIFE


@pytest.mark.parametrize("end", ["expired", "revoked"])
def test_a_name_whose_certificate_ended_is_enrolled_again_in_its_own_folder(
    authority: Authority, clock: Clock, tmp_path: Path, end: str
) -> None:
    place = {"pi-1": tmp_path / "pi-1"}
    (first,) = authority.bake(place)
    with pytest.raises(ConfigError, match="has a certificate"):
        authority.claim(place)
    if end == "revoked":
        authority.revoke("pi-1")
    else:
        clock.now = first.expires
    (claim,) = authority.claim(place)
    assert (claim.role, claim.device) == ("claim", "pi-1")
    (tmp_path / "pi-2").mkdir()
    (tmp_path / "pi-2" / "own.txt").touch()
    with pytest.raises(ConfigError, match="exists already"):
        authority.claim({"pi-2": tmp_path / "pi-2"})


def test_certificates_that_end_soon_and_what_renews_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--identities", str(tmp_path)]

    def listed(*options: str) -> dict[str, str]:
        capsys.readouterr()
        assert main(["fleet", "certificates", *options, "--format", "json", *home]) == 0
        rows = json.loads(capsys.readouterr().out)
        return {row["name"].partition("-")[0]: str(row["renewal"]) for row in rows}

    assert main(["fleet", "enrol", "--baked", "pi-1", *home]) == 0
    assert main(["fleet", "enrol", "pi-2", *home]) == 0
    assert main(["fleet", "enrol", "--role", "viewer", "ann", *home]) == 0
    every, soon = listed(), listed("--within", "100d")
    assert {*every} == {"server", "reader", "operator", "registrar", "broker", "pi", "claim", "viewer"}
    assert {*soon} == {"operator", "reader", "claim", "viewer"}
    assert every["pi"].startswith("by the device from ") and "redeems it once" in every["claim"]
    assert {
        every[name][: every[name].index(" from")] for name in ("server", "operator", "broker", "registrar")
    } == {"by edge-fl broker up"}
    assert every["viewer"] == "by hand: edge-fl fleet rotate"
    assert main(["fleet", "rotate", str(tmp_path / "people/viewer-ann"), "--days", "300", *home]) == 0
    assert "viewer" not in listed("--within", "100d"), "the one that was replaced is not in use"
    assert main(["fleet", "certificates", "--within", "soon", *home]) == 4
