"""All topics as functions, `parse` as their inverse, and the access rules derived from them.

The topics of a fleet start with ``efl/1/FLEET``, where 1 is the protocol's major version:

    srv/state                         server   retained, will   whether the server is online
    srv/beat                          server                    heartbeat, every second, for other servers
    tuf/FILE                          server   retained         signed release metadata
    art/SHA256/GROUP/INDEX            server   retained         one 64 KiB chunk of a blob, addressed by the blob's hash
    round/RUN                         server   retained         the current round of a run
    d/DEVICE/dn/{assignment,cmd,ack}  server                    desired state (retained), commands, acknowledgements
    d/DEVICE/dn/agent                 server   retained         the desired release of the agent's own software
    d/DEVICE/dn/settings              server   retained         the operator's settings of one device
    d/DEVICE/dn/echo                  device                    message to itself: all earlier messages have arrived
    d/DEVICE/up/{state,meta}          device   retained         life cycle (also its will) and capabilities
    d/DEVICE/up/rpt/RUN/ROUND         device                    one report
    d/DEVICE/up/blob/ID/INDEX         device                    one chunk of an update
    d/DEVICE/up/{req,log}             device                    a request, a log line
    d/DEVICE/dn/sum                   server                    the next stage of a secure sum
    d/DEVICE/up/sum                   device                    the answer to it
    d/DEVICE/up/sum/ID/INDEX          device                    one chunk of a masked vector
    d/DEVICE/dn/query                 operator, server          a request for log lines or diagnostics
    d/DEVICE/up/query                 device                    the answer to it
    d/DEVICE/up/query/ID/INDEX        device                    one chunk of its content
    enroll/NAME/{req,rsp}             claim, device             a certificate for a claim, or a device's next one

Outside this branch a device may publish its predictions where Home Assistant expects them:

    homeassistant/sensor/DEVICE/#     device                    sensors, predictions, availability
    homeassistant/update/DEVICE/#     device                    versions of release and agent

A client's rights follow from the name on its certificate: `role_of` gives the role, `access_rules` its rights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from edge_fl import fields
from edge_fl.errors import InputError, ProtocolError
from edge_fl.fields import EXPECTED_NAME
from edge_fl.wire.roles import ACTIONS, PERSON_ROLES

MAJOR = 1
GROUP = 16  # chunks per group: one subscription fetches one group
NAME = re.compile(rf"{fields.NAME}\Z")
ID = re.compile(r"[a-z0-9-]{1,64}\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,11})\Z")
"""Canonical decimal, as str(int) formats it, so that a chunk has one topic."""
TUF_FILE = re.compile(r"(?:[1-9][0-9]{0,8}\.)?(?:root|targets|snapshot|timestamp)\.json\Z")
BROADCAST = ("srv", "tuf", "art", "round")
CLAIM, READER = "claim-", "reader-"

Role = Literal[
    "server",
    "reader",
    "admin",
    "registrar",
    "broker",
    "device",
    "claim",
    "worker",
    "viewer",
    "operator",
    "releaser",
]
Down = Literal["assignment", "agent", "settings", "cmd", "ack", "echo", "sum", "query"]
Up = Literal["state", "meta", "req", "log", "rpt", "blob", "sum", "query"]
DOWN: tuple[Down, ...] = get_args(Down)
UP: tuple[Up, ...] = get_args(Up)
REPORTS: tuple[Up, ...] = ("rpt", "blob")
"""Kinds that several processes may receive for one server; their topics have further levels."""
HomeAssistantComponent = Literal["sensor", "update"]
Right = Literal["read", "write", "readwrite", "deny"]
RESERVED: dict[str, Role] = {
    "server": "server",
    "reader": "reader",  # second client of server and operator: a broker disconnects the older of two clients with one name
    "operator": "admin",  # the owner of the CA; all rights of people
    "registrar": "registrar",  # answers requests for certificates
    "broker": "broker",
}
"""Names that no device can have, and their roles."""
PREFIXES: dict[str, Role] = {
    CLAIM: "claim",
    READER: "reader",
    "worker-": "worker",
    **{f"{role}-": role for role in PERSON_ROLES},
}
"""Beginnings of names that no device can have, and their roles."""
FAMILIES = {
    "all": "#",
    "srv": "srv/#",
    "tuf": "tuf/#",
    "art": "art/#",
    "down": "d/+/dn/#",
    "assignment": "d/+/dn/assignment",
    "cmd": "d/+/dn/cmd",
    "state": "d/+/up/state",
    "meta": "d/+/up/meta",
    "log": "d/+/up/log",
    "query": "d/+/dn/query",
    "answers": "d/+/up/query/#",
}
"""Families of topics in the table of what people may do -> pattern."""


@dataclass(frozen=True)
class Address:
    """A parsed topic: its `kind` ("state", "assignment", "rpt", "art", ...), the device it belongs to, and the rest of its path."""

    kind: str
    device: str = ""
    path: tuple[str, ...] = ()


def checked(name: str, what: str = "name") -> str:
    """Return `name` if it can be part of a topic. Raises ProtocolError."""
    if not NAME.match(name):
        raise ProtocolError(f"{what} {name[:100]!r}: {EXPECTED_NAME}", consequence="nothing was sent")
    return name


def checked_device(name: str) -> str:
    """Return `name` if a device can have it. Raises InputError, also for the names of servers, people and claims."""
    if not NAME.match(name):
        raise InputError(f"device {name[:100]!r}: {EXPECTED_NAME}")
    if (role := role_of(name)) != "device":
        raise InputError(f"{name}: a name of the role {role}, expected that of a device")
    return name


@dataclass(frozen=True)
class Topics:
    """All topics of one fleet. An argument of "+" turns a topic into a subscription, and so does "#" as the last."""

    fleet: str

    @property
    def root(self) -> str:
        return f"efl/{MAJOR}/{self.fleet}"

    def server(self, kind: Literal["state", "beat"]) -> str:
        return f"{self.root}/srv/{kind}"

    def tuf(self, file: str) -> str:
        return f"{self.root}/tuf/{file}"

    def chunk(self, sha256: str, index: int) -> str:
        return f"{self.root}/art/{sha256}/{index // GROUP}/{index}"

    def chunk_group(self, sha256: str, group: int | str) -> str:
        return f"{self.root}/art/{sha256}/{group}/+"

    def round(self, run_id: str) -> str:
        return f"{self.root}/round/{run_id}"

    def down(self, device: str, kind: Down | Literal["#"]) -> str:
        """A message to one device."""
        return f"{self.root}/d/{device}/dn/{kind}"

    def up(self, device: str, kind: Up | Literal["#"], *path: str | int) -> str:
        """A message from one device; path: the run and round of a report, the id and index of a chunk."""
        return "/".join([f"{self.root}/d/{device}/up/{kind}", *map(str, path)])

    def enrol(self, claim: str, kind: Literal["req", "rsp"]) -> str:
        return f"{self.root}/enroll/{claim}/{kind}"

    def parse(self, topic: str) -> Address:
        """Inverse of all functions above. Raises ProtocolError for any other topic."""
        prefix = self.root + "/"
        if not topic.startswith(prefix):
            raise ProtocolError(f"topic {topic!r}: expected one below {self.root!r}")
        address = _parse(topic[len(prefix) :].split("/"))
        if address is None:
            raise ProtocolError(f"topic {topic!r}: not part of protocol {MAJOR}")
        return address

    def sender(self, topic: str) -> str:
        """The device level of a topic that `parse` rejects, or "": names the sender in a report of the error."""
        branch, _, rest = topic.removeprefix(f"{self.root}/").partition("/")
        return rest.partition("/")[0][:32] if branch == "d" else ""


def _parse(path: list[str]) -> Address | None:
    match path:
        case ["srv", "state"]:
            return Address("server_state")
        case ["srv", "beat"]:
            return Address("beat")
        case ["tuf", file] if TUF_FILE.match(file):
            return Address("tuf", path=(file,))
        case ["art", sha, group, index] if SHA256.match(sha) and _in_group(group, index):
            return Address("art", path=(sha, group, index))
        case ["round", run_id] if NAME.match(run_id):
            return Address("round", path=(run_id,))
        case ["d", device, *rest] if NAME.match(device):
            return _parse_device(device, rest)
        case ["enroll", claim, ("req" | "rsp") as kind] if NAME.match(claim):
            return Address("enrol_" + kind, claim)
    return None


def _parse_device(device: str, path: list[str]) -> Address | None:
    match path:
        case ["dn", kind] if kind in DOWN:
            return Address(kind, device)
        case ["up", kind] if kind in UP and kind not in REPORTS:  # of a kind in both directions: the reply
            return Address(kind + "_reply" if kind in DOWN else kind, device)
        case ["up", "rpt", run_id, number] if NAME.match(run_id) and NUMBER.match(number):
            return Address("rpt", device, (run_id, number))
        case ["up", "blob", id, index] if ID.match(id) and NUMBER.match(index):
            return Address("blob", device, (id, index))
        case ["up", kind, id, index] if kind in UP and kind in DOWN and ID.match(id) and NUMBER.match(index):
            return Address(kind + "_chunk", device, (id, index))
    return None


def _in_group(group: str, index: str) -> bool:
    return bool(NUMBER.match(group) and NUMBER.match(index)) and int(group) == int(index) // GROUP


def home_assistant(device: str, leaf: str, component: HomeAssistantComponent = "sensor") -> str:
    """A topic of a device's branches for Home Assistant, one for each component."""
    return f"homeassistant/{component}/{device}/{leaf}"


def _home_assistant_branches(device: str) -> list[str]:
    return [home_assistant(device, "#", component) for component in get_args(HomeAssistantComponent)]


def role_of(name: str) -> Role:
    """The role that follows from a name on a certificate: that of a reserved name or beginning, else device."""
    if name in RESERVED:
        return RESERVED[name]
    return next((role for beginning, role in PREFIXES.items() if name.startswith(beginning)), "device")


def access_rules(fleet: str) -> Iterator[tuple[Role, Right, str]]:
    """Yield (role, right, pattern) triples; %u is the name on the certificate. Anything not granted is denied.

    The rules of a device apply to every name, like a broker's patterns; "deny" takes precedence and removes the excess rights of claims and
    people.
    """
    root = Topics(fleet).root
    yield "server", "readwrite", f"{root}/#"
    for kind in REPORTS:
        yield "worker", "read", f"{root}/d/+/up/{kind}/#"
    yield "worker", "write", f"{root}/d/+/dn/ack"
    yield "reader", "read", f"{root}/#"
    yield from (("admin", "read", branch) for branch in _home_assistant_branches("+"))
    for action in ACTIONS.values():
        people: list[Role] = ["admin", *(role for role in PERSON_ROLES if role in action.roles)]
        for role in people:
            yield from ((role, "read", f"{root}/{FAMILIES[family]}") for family in action.reads)
            yield from ((role, "write", f"{root}/{FAMILIES[family]}") for family in action.writes)
    for role in PERSON_ROLES:  # "deny": what the rules of a device would add
        yield from ((role, "read", branch) for branch in _home_assistant_branches("+"))
        reads = {family for each in ACTIONS.values() if role in each.roles for family in each.reads}
        for family in ("enroll", "d/%u", *(each for each in BROADCAST if not reads & {each, "all"})):
            yield role, "deny", f"{root}/{family}/#"
        yield from ((role, "deny", branch) for branch in _home_assistant_branches("%u"))
    yield "registrar", "readwrite", f"{root}/enroll/#"
    for family in BROADCAST:
        yield "device", "read", f"{root}/{family}/#"
    yield "device", "read", f"{root}/d/%u/dn/#"
    yield "device", "write", f"{root}/d/%u/dn/echo"
    yield "device", "write", f"{root}/d/%u/up/#"
    yield from (("device", "write", branch) for branch in _home_assistant_branches("%u"))
    yield "device", "read", f"{root}/enroll/%u/rsp"
    yield "device", "write", f"{root}/enroll/%u/req"
    for family in (*BROADCAST, "d"):
        yield "claim", "deny", f"{root}/{family}/#"
    yield from (("claim", "deny", branch) for branch in _home_assistant_branches("+"))
