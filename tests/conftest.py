"""What every package's tests may use: a real mosquitto, a real PostgreSQL, and certificates."""

import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import settings

from tests import without_extensions

if without_extensions.VARIABLE in os.environ:
    without_extensions.block()  # before anything imports them

from edge_fl.console.output import QUIET
from edge_fl.errors import ConnectError
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program, find
from edge_fl_broker.mosquitto import Mosquitto
from tests.browsing import chromium
from tests.postgresql import Postgresql, PostgresqlMissingError
from tests.releases import fetch, make_release

__all__ = ["fetch", "make_release"]  # fixtures

pytest_plugins = ["tests.once_more"]

ADDRESSES = "127.0.0.1", "10.0.2.2"  # this machine, and this machine as one that qemu emulates sees it

Issue = Callable[[str], tuple[Path, Path, Path]]

# The same examples in every run, so that a failure is reproducible. `make nightly` draws many new ones and prints how to
# reproduce a failure.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=10_000, print_blob=True)
settings.load_profile("ci")


def pytest_configure() -> None:
    """Undo that a shell lets its background jobs, such as a CI script, ignore Ctrl-C: every program of the tests would inherit it."""
    with suppress(
        ValueError
    ):  # not the main thread of a worker, which inherits it from the process that does this
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # once those of other markers are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases marked nightly to the nightly profile, and let the long tests begin first."""
    if config.getoption("--hypothesis-profile") != "nightly":
        later = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
    if workers := getattr(config, "workerinput", {}).get("workercount", 0):
        items[:] = _long_first(items, workers)


def _long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Let each worker begin with a test marked long: worksteal gives each an equal share of the list, in its order."""
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    ordered: list[pytest.Item] = []
    for number in range(workers):
        first = long[number::workers]
        share = (len(items) - len(ordered)) // (workers - number)
        ordered += [*first, *islice(others, max(0, share - len(first)))]
    return [*ordered, *others]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: sums depend on their number, and a worker has one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset `--quiet` after tests that set it."""
    monkeypatch.delenv(QUIET, raising=False)


@pytest.fixture(scope="session")
def mosquitto_program() -> Program:
    """The mosquitto of this machine; tests that need one are skipped where there is none."""
    try:
        return find()
    except ConnectError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mosquitto(mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """One broker on a free loopback port for the whole session: clients need names, and topics, of their own."""
    with Mosquitto(BrokerSettings(tmp_path_factory.mktemp("mosquitto"), port=0), mosquitto_program) as broker:
        yield broker


@pytest.fixture(scope="session")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Issue:
    """`issue(name)` -> (ca, certificate, key) as PEM files; the certificate is good for loopback and its owner's name."""
    folder = tmp_path_factory.mktemp("pki")
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test-ca")])
    now = datetime.now(UTC)

    def sign(name: x509.Name, public: ec.EllipticCurvePublicKey, ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address(address)) for address in ADDRESSES]),
                critical=False,
            )
        )
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(sign(ca_name, ca_key.public_key(), ca=True))

    def issue_one(name: str) -> tuple[Path, Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, key_file = folder / f"{name}.pem", folder / f"{name}.key"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate.write_bytes(sign(subject, key.public_key(), ca=False))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key_file.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        return folder / "ca.pem", certificate, key_file

    return issue_one


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """A PostgreSQL for the whole session; tests that need one are skipped where there is none."""
    # Not below pytest's temporary folder, which nobody but its owner may enter.
    with tempfile.TemporaryDirectory(prefix="edge-fl-postgresql-") as folder:
        Path(folder).chmod(0o755)
        try:
            with Postgresql(Path(folder) / "cluster") as server:
                yield server
        except PostgresqlMissingError as missing:
            pytest.skip(f"PostgreSQL: {missing}")


@pytest.fixture
def new_postgresql_database(postgresql: Postgresql) -> Callable[[], str]:
    """Makes an empty database -> its URL."""
    return lambda: postgresql.url(f"test_{secrets.token_hex(4)}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium without a window; tests that need one are skipped where there is none."""
    program = chromium()
    if program is None:
        pytest.skip("chromium: none on this machine")
    from playwright.sync_api import sync_playwright

    silent = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost"
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", silent]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=options, timeout=120_000)
        yield started
        started.close()
