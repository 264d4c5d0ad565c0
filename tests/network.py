"""A network of its own for the programs of a test, in which every connection attempt and every name lookup is recorded.

It is a network namespace in which all addresses, also those of other hosts, belong to the loopback interface. A resolver answers every
name with one address, so that a program that looks up a host goes on to connect to it, and both are seen; nothing reaches another machine.
"""

import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path

HOST = "198.51.100.7"  # of a range for documentation: the address of every name
DNS = 53
TCP, UDP = 6, 17
KERNEL = {1, 2, 58}  # ICMP, IGMP, ICMPv6: the kernel's own
ALL_PROTOCOLS = 0x0003
SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE = 263, 6, 33  # of Linux; Python has no names for them
BUFFER_BYTES = 64 * 1024 * 1024
SET_UP = "ip link set lo up && ip route add local default dev lo && { ip -6 route add local default dev lo || true; }"


@dataclass(frozen=True)
class Network:
    """`namespace` is the path of the namespace, "" where none can be made (`allowed`); `record` is the file of the recorder."""

    namespace: str
    record: Path

    @property
    def prefix(self) -> list[str]:
        """What starts a command in this network."""
        return ["nsenter", f"--net={self.namespace}"] if self.namespace else []

    def used(self) -> set[str]:
        """What was contacted: "tcp ADDRESS PORT", "udp ADDRESS PORT", "name HOST", and "lost" if the recorder missed packets."""
        return set(self.record.read_text().splitlines()) if self.namespace else set()

    def foreign(self) -> set[str]:
        """All names, and all addresses other than loopback."""
        return {line for line in self.used() if not _is_loopback(line)}


def _is_loopback(line: str) -> bool:
    kind, _, rest = line.partition(" ")
    address = rest.partition(" ")[0]
    return kind in ("tcp", "udp") and ip_address(address).is_loopback


@cache
def allowed() -> bool:
    """Whether this process may make a network: only root may, and not in every container."""
    try:
        return subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


@contextmanager
def recorded_network(folder: Path) -> Iterator[Network]:
    """A new network; the record is a file in `folder`."""
    record = folder / ".network"
    record.touch()
    if not allowed():
        yield Network("", record)
        return
    command = f'{SET_UP} && exec "$0" -m tests.network "$1"'
    recorder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", command, sys.executable, str(record)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert recorder.stdout
        assert recorder.stdout.readline() == "up\n"
        yield Network(f"/proc/{recorder.pid}/ns/net", record)
        assert recorder.poll() is None, "the recorder ended early"
    finally:
        recorder.kill()
        recorder.communicate()


def record(file: Path) -> None:
    """Resolve names and write what is contacted, once each, until standard input ends."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PROTOCOLS))
    wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    resolvers = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)]
    resolvers[1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    for resolver in resolvers:
        resolver.bind(("", DNS))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    seen: set[str] = set()
    with file.open("a", buffering=1) as out:
        while sys.stdin not in (ready := select.select([sys.stdin, wire, *resolvers], [], [])[0]):
            lines = set()
            if wire in ready:
                packet = wire.recv(512)
                lines |= {line for line in [contacted(packet)] if line}
                _, lost = struct.unpack("II", wire.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
                lines |= {"lost"} if lost else set()
            for resolver in resolvers:
                if resolver in ready:
                    question, sender = resolver.recvfrom(512)
                    resolver.sendto(answer(question), sender)
            for line in sorted(lines - seen):
                out.write(line + "\n")
            seen |= lines


def contacted(packet: bytes) -> str:
    """What an IP packet contacts, as in `Network.used`; "" for responses, later packets of a connection and the kernel's own."""
    if packet[0] >> 4 == 4:
        protocol, payload = packet[9], packet[4 * (packet[0] & 15) :]
        target = ip_address(packet[16:20])
    else:
        protocol, payload = packet[6], packet[40:]
        target = ip_address(packet[24:40])
    if protocol in KERNEL:
        return ""
    if protocol not in (TCP, UDP):
        return f"protocol-{protocol} {target} 0"
    sender, receiver = struct.unpack("!HH", payload[:4])
    if protocol == TCP:
        syn_without_ack = payload[13] & 0x12 == 0x02
        return f"tcp {target} {receiver}" if syn_without_ack else ""
    if sender == DNS:
        return ""
    return f"name {name(payload[8:])}" if receiver == DNS else f"udp {target} {receiver}"


def name(question: bytes) -> str:
    """The host name of a DNS question."""
    labels, start = [], 12
    while start < len(question) and (length := question[start]):
        labels.append(question[start + 1 : start + 1 + length].decode(errors="replace"))
        start += 1 + length
    return ".".join(labels)


def answer(question: bytes) -> bytes:
    """The DNS answer: HOST to a question for an IPv4 address, nothing to others."""
    end = question.index(0, 12) + 5
    (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
    found = kind == 1
    header = question[:2] + struct.pack("!HHHHH", 0x8180, 1, int(found), 0, 0)
    resource = struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(HOST)
    return header + question[12:end] + (resource if found else b"")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
