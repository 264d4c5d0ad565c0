"""Keep a broker up to date with the register: claims, workers, people and denied names."""

from dataclasses import replace
from pathlib import Path

from cryptography import x509

from edge_fl.errors import ConfigError, shortened
from edge_fl.files.paths import text
from edge_fl.wire.host_names import ANYWHERE, own_addresses
from edge_fl.wire.identity import CA_FILE, CERT_FILE, KEY_FILE
from edge_fl_broker.config import BrokerSettings, Certificates
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision.authority import Authority
from edge_fl_broker.provision.register import denied, named, next_end

MAX_NAMED = 8


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


RESTARTED = ": mosquitto was restarted for it, so all clients reconnect (planned)"


def _changes(before: BrokerSettings, now: BrokerSettings) -> str:
    """Which names have other rights than before; "" for none, as after a revoked certificate whose name has a new one."""
    lost, won = {*now.denied} - {*before.denied}, {*before.denied} - {*now.denied}
    named = {*now.named} - {*before.named}, {*before.named} - {*now.named}
    lists = {
        "denied": lost,
        "no longer denied": won,
        "rights by name": named[0],
        "no longer by name": named[1],
    }
    return "; ".join(
        f"{what}: {shortened(sorted(names), MAX_NAMED)}" for what, names in lists.items() if names
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
            return f"certificate reloaded{RESTARTED}"
        if stamps == self._seen and not (self._next_end and now >= self._next_end):
            return ""
        settings, ended = with_register(self._broker.settings, self._authority), self._revoked()
        before = self._broker.settings
        changed = settings != before or ended != self._ended
        if changed:
            self._broker.reload(settings)
        self._seen, self._ended = stamps, ended
        self._next_end = next_end(self._authority.register.rows(), now)
        if not changed:
            return ""
        what = "; ".join(
            filter(None, (_changes(before, settings), "" if self._broker.reloads else RESTARTED[2:]))
        )
        return "access list reloaded" + (f": {what}" if what else "")

    def _stamp(self) -> int:
        return (self._authority.home / "broker" / CERT_FILE).stat().st_mtime_ns

    def _stamps(self) -> tuple[int, ...]:
        files = (self._authority.register.path, self._authority.revoked_path)
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in files)

    def _revoked(self) -> set[int]:
        """Serial numbers in the revocation list, which is signed anew at every certificate even if they stay the same."""
        revoked = x509.load_pem_x509_crl(self._authority.revoked_path.read_bytes())
        return {row.serial_number for row in revoked}
