"""The certificate authority of one fleet, in a folder that must not be copied to devices.

HOME/ca.crt, ca.key                         the CA; the key never leaves this folder
HOME/register.json                          issued and revoked certificates
HOME/revoked.crl                            revocation list for the broker
HOME/{broker,server,operator,registrar}/    identities of roles other than device
HOME/{server,operator}/reader/              identities for a second connection
HOME/people/ROLE-NAME/                      identities of people, short-lived
HOME/server/denied                          names that the server ignores, one per line
HOME/server/tags.json                       tags that devices were enrolled with
"""

import hashlib
import hmac
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from msgspec.structs import replace

from edge_fl.errors import ConfigError
from edge_fl.failures import Failure
from edge_fl.fields import EXPECTED_NAME
from edge_fl.files import atomic
from edge_fl.files.accounts import local_user
from edge_fl.files.paths import text
from edge_fl.fleet import actions
from edge_fl.fleet.tags import TAGS_FILE, Tags
from edge_fl.wire import host_names, identity
from edge_fl.wire.identity import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    TOKEN_FILE,
    Identity,
    IdentityError,
    Key,
    Token,
)
from edge_fl.wire.roles import PERSON_DAYS, PersonRole
from edge_fl.wire.topics import CLAIM, NAME, READER, RESERVED, role_of
from edge_fl_broker.provision import certificates
from edge_fl_broker.provision.register import PERSONAL, Issued, Register, denied

log = logging.getLogger(__name__)

LIFE = timedelta(days=365 * 5)
CLAIM_LIFE = timedelta(days=30)
PERSON_LIFE = timedelta(days=PERSON_DAYS)
MAX_HOLDING = 8  # valid certificates per name, so that a device that requests endlessly gets no more
FOLDERS = {
    "server": "server",
    "reader": "server/reader",
    "operator": "operator",
    "registrar": "registrar",
}
"""Roles other than device, and the folders of their identities."""
OPERATOR, SECOND = "operator", "reader"


class RequestRejectedError(IdentityError):
    """A rejected certificate request; its text is the failure word sent to the requester."""

    def __init__(self, word: Failure) -> None:
        super().__init__(word)


def broker_hosts() -> tuple[str, ...]:
    """Names and addresses under which a broker on this machine is usually reached."""
    name = socket.gethostname().lower()
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", name, f"{name.partition('.')[0]}.local")))


def broker_names(certificate: Path) -> tuple[str, ...]:
    """Names and addresses for which a certificate (PEM) is valid. Raises ConfigError."""
    try:
        return host_names.certified(x509.load_pem_x509_certificate(certificate.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{text(certificate)}: {error}; expected a certificate as PEM") from error


class Authority:
    """`make` creates an authority, `open` loads one. Certificates are registered before they are handed out."""

    def __init__(
        self,
        home: Path,
        ca: x509.Certificate,
        key: Key,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.home, self.register, self.now = home, Register(home), clock
        self._ca, self._key = ca, key

    @classmethod
    def open(cls, home: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> "Authority":
        """Load the authority in `home`. Raises ConfigError if there is none."""
        try:
            ca = x509.load_pem_x509_certificate((home / CA_FILE).read_bytes())
            key = identity.load_key((home / "ca.key").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{text(home)}: no certificate authority ({error}); create one with 'edge-fl fleet enrol'"
            ) from error
        return cls(home, ca, key, clock)

    @classmethod
    def make(cls, home: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> "Authority":
        """Load the authority in `home`, or create it with the identities of all roles other than device. Raises ConfigError."""
        if not (home / CA_FILE).exists():
            key = identity.new_key()
            ca = certificates.authority(f"edge-fl-{secrets.token_hex(4)}", key, clock())
            try:
                home.mkdir(parents=True, exist_ok=True, mode=0o700)
                identity.write_private(home / "ca.key", identity.key_bytes(key))
                atomic.write(home / CA_FILE, certificates.pem(ca))
            except OSError as error:
                raise ConfigError(f"{text(home)}: {error.strerror}, expected a writable folder") from error
        authority = cls.open(home, clock)
        missing = {name: home / folder for name, folder in FOLDERS.items() if not (home / folder).exists()}
        for name, folder in missing.items():
            authority._issue({name: folder}, PERSON_LIFE if name == OPERATOR else LIFE)
        if not (home / FOLDERS[OPERATOR] / SECOND).exists():
            authority._second(identity.read(home / FOLDERS[OPERATOR]), PERSON_LIFE)
        if not (home / "broker").exists():
            authority.broker()
        authority.publish()
        return authority

    @property
    def ca(self) -> bytes:
        """The CA certificate as PEM."""
        return certificates.pem(self._ca)

    @property
    def revoked_path(self) -> Path:
        """Path of the revocation list."""
        return self.home / "revoked.crl"

    def bake(
        self, folders: Mapping[str, Path], life: timedelta = LIFE, tags: Tags | None = None
    ) -> list[Identity]:
        """Issue complete identities, keys included, into the given folders by name.

        Raises ConfigError if a name is taken, before issuing any.
        """
        identities = self._issue(folders, life, tags)
        self._note("enrol", folders)
        return identities

    def enrol_people(
        self, role: PersonRole, names: Iterable[str], out: Path, life: timedelta = PERSON_LIFE
    ) -> list[Identity]:
        """Issue identities "ROLE-NAME" into folders of `out`; a releaser gets a second one, to read while it acts as the server.

        Raises ConfigError like `bake`.
        """
        people = {f"{role}-{name}": out / f"{role}-{name}" for name in names}
        enrolled = self._issue(people, life, person=True)
        for person in enrolled if role == "releaser" else ():
            self._second(person, life)
        self._note("enrol", people)
        return enrolled

    def claim(
        self, folders: Mapping[str, Path], life: timedelta = CLAIM_LIFE, tags: Tags | None = None
    ) -> list[Identity]:
        """Issue a claim per device into its folder; it is good for one certificate of that device. Raises ConfigError like `bake`."""
        claims = self._issue(folders, life, tags, claim=True)
        self._note("enrol", folders)
        return claims

    def _issue(
        self,
        folders: Mapping[str, Path],
        life: timedelta,
        tags: Tags | None = None,
        *,
        person: bool = False,
        claim: bool = False,
    ) -> list[Identity]:
        """Issue identities, or claims for them, into folders by name."""
        issued: dict[str, tuple[x509.Certificate, Key, Token | None]] = {}
        with self.register.changing() as rows:
            self._require_free(rows, folders, person=person)
            for name in folders:
                certificate, key = self._pair(CLAIM + secrets.token_hex(6) if claim else name, life)
                row, token = self._issued(certificate, tags=tags), None
                if claim:
                    token = Token(name, secrets.token_urlsafe(32), certificate.not_valid_after_utc)
                    row = replace(row, device=name, token=_digest(token.secret))
                rows.append(row)
                issued[name] = certificate, key, token
                if folders[name].exists():  # an ended identity of this name
                    shutil.rmtree(folders[name])
        self._publish_tags()
        return [
            identity.write(folders[name], self.ca, certificates.pem(certificate), key, token)
            for name, (certificate, key, token) in issued.items()
        ]

    def answer(self, sender: str, request: bytes, secret: str = "") -> bytes:
        """Answer a request with a certificate (PEM): a claim gets its device's, with its secret; any other sender its own.

        A claim can be redeemed only for certificates on a single key: a device that lost the answer to a power cut repeats its request with
        the same key. Raises IdentityError, in particular RequestRejectedError.
        """
        name, public_key = certificates.read_request(request)
        with self.register.changing() as rows:
            now = self.now()
            valid = [row for row in rows if row.name == sender and row.holds(now)]
            if not valid:
                raise RequestRejectedError(Failure.UNKNOWN)
            if sum(row.name == name and row.holds(now) for row in rows) >= MAX_HOLDING:
                raise RequestRejectedError(Failure.TOO_MANY)
            if (claim := valid[-1]).role not in ("claim", "device"):  # a person could stay for ever
                raise RequestRejectedError(Failure.WRONG_ROLE)
            if claim.role == "claim":
                if not hmac.compare_digest(claim.token, _digest(secret)):
                    raise RequestRejectedError(Failure.WRONG_TOKEN)
                if name != claim.device:
                    raise RequestRejectedError(Failure.WRONG_NAME)
                used_for = certificates.fingerprint(public_key)
                if claim.key not in ("", used_for):
                    raise RequestRejectedError(Failure.USED)
                rows[rows.index(claim)] = replace(claim, key=used_for)
            elif name != sender:
                raise RequestRejectedError(Failure.WRONG_NAME)
            certificate = certificates.leaf(name, public_key, self._ca, self._key, self.now(), LIFE)
            rows.append(replace(self._issued(certificate), issued_by=f"request of {sender}"))
        self.publish()
        return certificates.pem(certificate)

    def broker(self, hosts: Sequence[str] = ()) -> Identity:
        """The broker's identity, reissued when it lacks one of these hosts or is about to expire; earlier hosts stay."""
        folder = self.home / "broker"
        required, current = set(map(host_names.canonical, (*broker_hosts(), *hosts))), None
        if folder.exists():
            current, covered = identity.read(folder), self.broker_names()
            if all(host_names.covers(covered, host) for host in required) and self.now() < current.renew_at:
                return current
            required |= set(covered)
        certificate, key = self._pair("broker", LIFE, sorted(required))
        self._enter(certificate)
        pem = certificates.pem(certificate)
        if current is None:
            return identity.write(folder, self.ca, pem, key)
        renewed = identity.replace(folder, pem, key)
        self._note("rotate", ["broker"])
        return renewed

    def broker_identity(self) -> Identity:
        """The broker's identity as it is. Raises ConfigError."""
        return identity.read(self.home / "broker")

    def broker_names(self) -> tuple[str, ...]:
        """Names and addresses for which the broker's certificate is valid."""
        return broker_names(self.home / "broker" / CERT_FILE)

    def renew_own(self) -> datetime | None:
        """Renew the identities of FOLDERS that are here and of which two thirds of their life are over -> when the next one is due."""
        due = []
        for folder in (self.home / name for name in FOLDERS.values()):
            if folder.exists():
                current = identity.read(folder)
                renewed = self.rotate(folder) if self.now() >= current.renew_at else current
                due.append(renewed.renew_at)
        return min(due, default=None)

    @property
    def expires(self) -> datetime:
        """When the CA's own certificate ends."""
        return self._ca.not_valid_after_utc

    def rotate(self, folder: Path, life: timedelta | None = None) -> Identity:
        """Replace the identity in `folder`, by default for the usual life of its role, and a person's second one.

        The old certificate stays valid, so that copies of it still work.
        """
        name = identity.read(folder).name
        if name == "broker":
            raise ConfigError(
                f"{text(folder)}: 'edge-fl broker up' renews the broker's certificate, 'edge-fl broker certificate' adds names to it"
            )
        last = next((row for row in reversed(self.register.rows()) if row.name == name), None)
        person, owner = (last.person, last.device) if last else (False, "")
        life = life or (PERSON_LIFE if person or name == OPERATOR else LIFE)
        certificate, key = self._pair(name, life)
        self._enter(certificate, owner)
        renewed = identity.replace(folder, certificates.pem(certificate), key)
        if (second := folder / SECOND).exists() and identity.read(second).name.startswith(READER):
            self.rotate(second, life)
        if not name.startswith(READER):
            self._note("rotate", [renewed.name])
        return renewed

    def revoke(self, name: str) -> list[Issued]:
        """Revoke every certificate for `name` and every claim for it. Raises ConfigError if there is no valid one."""
        now = self.now()
        ended = []
        with self.register.changing() as rows:
            for index, row in enumerate(rows):
                if name in (row.name, row.device) and row.holds(now):
                    rows[index] = replace(row, revoked=now, revoked_by=local_user())
                    ended.append(rows[index])
        if not ended:
            raise ConfigError(
                f"{name!r}: has no valid certificate, expected a name listed by 'edge-fl fleet certificates'"
            )
        self.publish()
        self._note("revoke", [name])
        return ended

    def publish(self) -> None:
        """Write the files that follow from the register: the revocation list and the denied names."""
        rows, now = self.register.rows(), self.now()
        over = [(int(row.serial, 16), row.revoked) for row in rows if row.revoked and now < row.expires]
        revoked = certificates.revocations(over, self._ca, self._key, now)
        atomic.write(self.revoked_path, certificates.pem(revoked))
        atomic.write(
            self.home / FOLDERS["server"] / identity.DENIED_FILE, "".join(f"{n}\n" for n in denied(rows, now))
        )

    def _pair(self, name: str, life: timedelta, hosts: Sequence[str] = ()) -> tuple[x509.Certificate, Key]:
        key = identity.new_key()
        return certificates.leaf(name, key.public_key(), self._ca, self._key, self.now(), life, hosts), key

    def _note(self, action: str, names: Iterable[str]) -> None:
        """Note an action for the server's audit log; where that is not possible, the action remains."""
        try:
            actions.note(self.home / FOLDERS["server"], action, names)
        except OSError as error:
            log.warning("%s: %s; this is not in the audit log", error.filename, error.strerror)

    def _publish_tags(self) -> None:
        """Write the tags of enrolled devices for the server; a later enrolment of a device replaces its earlier ones."""
        given = {row.device or row.name: row.tags for row in self.register.rows() if row.tags}
        if given:
            atomic.write(self.home / FOLDERS["server"] / TAGS_FILE, msgspec.json.encode(given))

    def _issued(self, certificate: x509.Certificate, device: str = "", tags: Tags | None = None) -> Issued:
        return Issued(
            identity.common_name(certificate.subject),
            f"{certificate.serial_number:x}",
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            device=device,
            tags=dict(tags or {}),
            issued_by=local_user(),
        )

    def _enter(self, certificate: x509.Certificate, owner: str = "") -> None:
        with self.register.changing() as rows:
            rows.append(self._issued(certificate, owner))

    def _second(self, owner: Identity, life: timedelta) -> None:
        """Issue the identity for a second connection of `owner`, which only reads; it is revoked with the owner's."""
        certificate, key = self._pair(READER + secrets.token_hex(6), life)
        self._enter(certificate, owner.name)
        identity.write(owner.folder / SECOND, self.ca, certificates.pem(certificate), key)

    def _require_free(
        self, rows: Iterable[Issued], folders: Mapping[str, Path], *, person: bool = False
    ) -> None:
        now = self.now()
        taken = {name for row in rows if row.holds(now) for name in (row.name, row.device)}
        for name, folder in folders.items():
            role = role_of(name)
            personal = role in PERSONAL and name not in RESERVED
            if not NAME.match(name) or role in ("claim", "broker") or personal != person:
                raise ConfigError(f"{name[:100]!r}: {EXPECTED_NAME}, and no reserved name (people: --role)")
            if name in taken:
                raise ConfigError(
                    f"{name!r}: has a certificate or a claim already, expected a new name ('edge-fl fleet rotate' renews it,"
                    " 'fleet revoke' revokes it)"
                )
            if folder.exists() and not _is_of(folder, name):
                raise ConfigError(
                    f"{folder}: exists already, expected a new folder ('edge-fl fleet rotate {folder}' renews an identity)"
                )
            _require_writable(folder)


def _require_writable(folder: Path) -> None:
    """Checked in advance: names are registered before their folders are created."""
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise ConfigError(f"{text(folder)}: {text(above)} is not writable, expected a writable folder")


def _is_of(folder: Path, name: str) -> bool:
    """Whether a folder holds nothing but an identity or a claim of this name."""
    with suppress(ConfigError):
        files = {CA_FILE, CERT_FILE, KEY_FILE, TOKEN_FILE}
        return identity.read(folder).device == name and {path.name for path in folder.iterdir()} <= files
    return False


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
