"""Which hosts a broker's certificate covers: as OpenSSL decides it, in every spelling."""

import shutil
import ssl
import subprocess
import sys
from ipaddress import ip_address

import pytest

from edge_fl.errors import ConfigError
from edge_fl.wire import host_names
from edge_fl.wire.endpoint import Endpoint
from edge_fl_broker.provision.authority import Authority

NAMES = ("*.farm.example", "127.0.0.1", "192.168.1.20", "fd00::1", "laptop.local", "localhost")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority.make(tmp_path_factory.mktemp("hosts") / "home")
    authority.broker(NAMES)
    return authority


@pytest.mark.parametrize(
    ("host", "covered"),
    [
        ("localhost", True),
        ("LapTop.local", True),
        ("laptop", False),
        ("laptop.local.example", False),
        ("192.168.1.20", True),
        ("192.168.1.2", False),
        ("fd00::1", True),
        ("FD00:0:0::0001", True),
        ("fd00::2", False),
        ("broker.farm.example", True),
        ("farm.example", False),
        ("a.broker.farm.example", False),
    ],
)
def test_the_answer_is_openssls(authority: Authority, host: str, covered: bool) -> None:
    names = authority.broker_names()
    assert set(NAMES) <= set(names)
    assert host_names.covers(names, host) is covered
    assert _openssl_accepts(authority, host) is covered


def _openssl_accepts(authority: Authority, host: str) -> bool:
    """Whether a TLS handshake with the broker's certificate, in memory, accepts the host."""
    folder = authority.home / "broker"
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "client.crt", folder / "client.key")
    client = Endpoint(ca=authority.home / "ca.crt").tls_context()
    assert client
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(down, up, server_hostname=host),
        server.wrap_bio(up, down, server_side=True),
    )
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return True


@pytest.mark.parametrize("host", ["", "a b", "a..b", "http://laptop", "laptop:8883", "x" * 64, "laptop/"])
def test_what_is_no_host_is_rejected_before_a_certificate_is_made(authority: Authority, host: str) -> None:
    before = (authority.home / "broker/client.crt").read_bytes()
    with pytest.raises(ConfigError, match="expected for example"):
        authority.broker([host])
    assert (authority.home / "broker/client.crt").read_bytes() == before


def test_one_spelling_per_host(authority: Authority) -> None:
    assert host_names.canonical("Büro.local") == "xn--bro-hoa.local"
    assert host_names.canonical("[FD00:0::1]") == "fd00::1"
    before = (authority.home / "broker/client.crt").read_bytes()
    authority.broker(["FD00:0::1", "LAPTOP.local", "any.farm.example"])  # covered already
    assert (authority.home / "broker/client.crt").read_bytes() == before


@pytest.mark.skipif(not shutil.which("ip"), reason="no ip: package iproute2")
def test_the_addresses_are_those_of_the_interfaces() -> None:
    """As `ip` lists them, in a network of this test's own, if one can be made."""
    script = "ip link set lo up; ip addr add 192.0.2.7/24 dev lo; ip addr add 192.0.2.8/24 dev lo; ip addr add 2001:db8::7/64 dev lo"
    code = "from edge_fl.wire.host_names import own_addresses; print(*own_addresses())"
    own = ["unshare", "--map-root-user", "--net", "sh", "-c", f'{script}; "$0" -c "{code}"', sys.executable]
    done = subprocess.run(own, capture_output=True, text=True, check=False)
    found = done.stdout.split()
    if "192.0.2.7" not in found and "Operation not" in done.stderr:
        pytest.skip("no network namespace with addresses here")
    assert found == ["192.0.2.7", "192.0.2.8", "2001:db8::7"], done.stderr
    assert not [each for each in host_names.own_addresses() if ip_address(each).is_loopback]
