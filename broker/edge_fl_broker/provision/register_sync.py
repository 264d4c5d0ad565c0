"""Keep a broker up to date with the register: claims, workers, people and denied names."""

from dataclasses import replace
from pathlib import Path

from cryptography import x509

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.wire.host_names import ANYWHERE, own_addresses
from edge_fl.wire.identity import CA_FILE, CERT_FILE, KEY_FILE
from edge_fl_broker.config import BrokerSettings, Certificates
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register import denied, named, next_end


def require(home: Path) -> None:
    """Raise ConfigError if there is no CA in `home`."""
    if not (home / CA_FILE).exists():
        raise ConfigError(
            f"{text(home)}: no identities, expected those of a fleet (create some with 'edge-fl fleet enrol --baked --count 12',"
            " or use --insecure for plaintext on loopback)"
        )


def certificates(authority: Authority, host: str) -> Certificates:
    """Certificate files of the broker, with CA and revocation list; valid for the addresses that it listens on, now and before."""
    folder = authority.broker(own_addresses() if host in ANYWHERE else (host,)).folder
    return Certificates(folder / CA_FILE, folder / CERT_FILE, folder / KEY_FILE, authority.revoked_path)


def with_register(settings: BrokerSettings, authority: Authority) -> BrokerSettings:
    """The settings with the current claims, workers, people and denied names."""
    rows, now = authority.register.rows(), authority.now()
    return replace(
        settings,
        named=tuple(named(rows, now)),
        denied=tuple(denied(rows, now)),
    )


class RegisterSync:
    """Watches register and certificate of a running broker; `update` is cheap while the files do not change.

    A newly issued device certificate changes nothing for the broker: its access list matches devices by a pattern.
    """

    def __init__(self, broker: Mosquitto, authority: Authority) -> None:
        self._broker, self._authority = broker, authority
        self._seen, self._ended = self._stamps(), self._revoked()
        self._next_end = next_end(authority.register.rows(), authority.now())
        self._own_due = authority.renew_own()
        self._certificate, self._renew_at = self._stamp(), authority.broker_identity().renew_at

    def update(self) -> str:
        """Reload the broker if claims, workers, people or revocations changed, restart it with a new certificate; return what was done.

        The broker checks dates only when a client connects: the rights of a person also end in an open session.

        Raises ConnectError, DeadlineError; the next call tries again.
        """
        stamps = self._stamps()
        now = self._authority.now()
        if self._own_due and now >= self._own_due:
            self._own_due = self._authority.renew_own()
        if now >= self._renew_at:
            self._authority.broker()
        if (
            certificate := self._stamp()
        ) != self._certificate:  # not every version reads it again on a signal
            self._broker.stop()
            self._broker.restart()
            self._certificate = certificate
            self._renew_at = self._authority.broker_identity().renew_at
            return "certificate reloaded"
        if stamps == self._seen and not (self._next_end and now >= self._next_end):
            return ""
        settings, ended = with_register(self._broker.settings, self._authority), self._revoked()
        changed = settings != self._broker.settings or ended != self._ended
        if changed:
            self._broker.reload(settings)
        self._seen, self._ended = stamps, ended
        self._next_end = next_end(self._authority.register.rows(), now)
        return "access list reloaded" if changed else ""

    def _stamp(self) -> int:
        return (self._authority.home / "broker" / CERT_FILE).stat().st_mtime_ns

    def _stamps(self) -> tuple[int, ...]:
        files = (self._authority.register.path, self._authority.revoked_path)
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in files)

    def _revoked(self) -> set[int]:
        """Serial numbers in the revocation list, which is signed anew at every certificate even if they stay the same."""
        revoked = x509.load_pem_x509_crl(self._authority.revoked_path.read_bytes())
        return {row.serial_number for row in revoked}
