"""`parse` is the inverse of every topic function, refuses all else, and the access rules fit the topics."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from edge_fl.errors import InputError, ProtocolError
from edge_fl.wire import topics
from edge_fl.wire.egress import SAID
from edge_fl.wire.messages import MESSAGES
from edge_fl.wire.topics import (
    DOWN,
    GROUP,
    NAME,
    PREFIXES,
    RESERVED,
    UP,
    Address,
    Topics,
    access_rules,
    checked,
    checked_device,
)

FLEET = Topics("main")
SHA = "0123456789abcdef" * 4

# One row per kind of topic: who publishes there, and how an address of that kind is spelt again.
TOPICS: dict[str, tuple[str, Callable[[Address], str]]] = {
    "server_state": ("server", lambda a: FLEET.server("state")),
    "beat": ("server", lambda a: FLEET.server("beat")),
    "tuf": ("server", lambda a: FLEET.tuf(*a.path)),
    "art": ("server", lambda a: FLEET.chunk(a.path[0], int(a.path[2]))),
    "round": ("server", lambda a: FLEET.round(*a.path)),
    "assignment": ("server", lambda a: FLEET.down(a.device, "assignment")),
    "agent": ("server", lambda a: FLEET.down(a.device, "agent")),
    "settings": ("server", lambda a: FLEET.down(a.device, "settings")),
    "cmd": ("server", lambda a: FLEET.down(a.device, "cmd")),
    "ack": ("server", lambda a: FLEET.down(a.device, "ack")),
    "echo": ("itself", lambda a: FLEET.down(a.device, "echo")),
    "state": ("device", lambda a: FLEET.up(a.device, "state")),
    "meta": ("device", lambda a: FLEET.up(a.device, "meta")),
    "rpt": ("device", lambda a: FLEET.up(a.device, "rpt", *a.path)),
    "blob": ("device", lambda a: FLEET.up(a.device, "blob", *a.path)),
    "req": ("device", lambda a: FLEET.up(a.device, "req")),
    "log": ("device", lambda a: FLEET.up(a.device, "log")),
    "sum": ("server", lambda a: FLEET.down(a.device, "sum")),
    "sum_reply": ("device", lambda a: FLEET.up(a.device, "sum")),
    "sum_chunk": ("device", lambda a: FLEET.up(a.device, "sum", *a.path)),
    "query": ("server", lambda a: FLEET.down(a.device, "query")),
    "query_reply": ("device", lambda a: FLEET.up(a.device, "query")),
    "query_chunk": ("device", lambda a: FLEET.up(a.device, "query", *a.path)),
    "enrol_req": ("claim", lambda a: FLEET.enrol(a.device, "req")),
    "enrol_rsp": ("server", lambda a: FLEET.enrol(a.device, "rsp")),
}
SPELL = {kind: spell for kind, (_, spell) in TOPICS.items()}
OF_NO_DEVICE = {"server_state", "beat", "tuf", "art", "round"}

# Short ones and the longest that is allowed.
names = st.one_of(st.from_regex(r"[a-z0-9][a-z0-9-]{0,31}", fullmatch=True), st.just("a" * 32))
ids = st.one_of(st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True), st.just("a" * 64))
hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
numbers = st.integers(0, 10**9)
files = st.from_regex(r"([1-9][0-9]{0,8}\.)?(root|targets|snapshot|timestamp)\.json", fullmatch=True)

ADDRESSES: dict[str, st.SearchStrategy[Address]] = {
    **{kind: st.builds(Address, st.just(kind), names) for kind in SPELL},
    "server_state": st.just(Address("server_state")),
    "beat": st.just(Address("beat")),
    "tuf": st.builds(lambda file: Address("tuf", path=(file,)), files),
    "art": st.builds(lambda sha, i: Address("art", path=(sha, str(i // GROUP), str(i))), hashes, numbers),
    "round": st.builds(lambda run_id: Address("round", path=(run_id,)), names),
    "rpt": st.builds(lambda d, run_id, n: Address("rpt", d, (run_id, str(n))), names, names, numbers),
    "blob": st.builds(lambda d, id, n: Address("blob", d, (id, str(n))), names, ids, numbers),
    "query_chunk": st.builds(lambda d, id, n: Address("query_chunk", d, (id, str(n))), names, ids, numbers),
    "sum_chunk": st.builds(lambda d, id, n: Address("sum_chunk", d, (id, str(n))), names, ids, numbers),
}
every_kind = pytest.mark.parametrize("kind", ADDRESSES)
few = settings(max_examples=25)  # for each kind


def test_every_topic_function_is_in_the_table() -> None:
    functions = {name for name, value in vars(Topics).items() if callable(value) and not name.startswith("_")}
    assert functions == {"server", "down", "up", "enrol", "tuf", "chunk", "round"} | {
        "chunk_group",
        "parse",
        "sender",
    }
    topics = [SPELL[kind](Address(kind, "pi-1")) for kind in SPELL.keys() - OF_NO_DEVICE]
    assert {"/".join(topic.split("/")[5:]) for topic in topics} == {
        *(f"dn/{kind}" for kind in DOWN),
        *(f"up/{kind}" for kind in UP),
        *("req", "rsp"),
    }


def test_every_message_travels_on_a_topic() -> None:
    assert MESSAGES.keys() <= SPELL.keys()


def test_the_egress_manifest_lists_every_message_that_a_device_sends() -> None:
    sent = {kind for kind, (who, _) in TOPICS.items() if who in ("device", "itself")}
    assert set(SAID) == sent & MESSAGES.keys()


def test_the_protocol_page_and_the_first_docstring_have_every_topic() -> None:
    page = (Path(__file__).parents[3] / "docs/protocol.md").read_text().partition("## 2. Topics")[2]
    described = set(re.findall(r"^\| `d/DEVICE/(\w+/\w+)", page.partition("## 3.")[0], re.MULTILINE))
    known = {f"dn/{kind}" for kind in DOWN} | {f"up/{kind}" for kind in UP}
    assert described == known
    assert not [kind for kind in DOWN + UP if not re.search(rf"\b{kind}\b", topics.__doc__ or "")]


@every_kind
@few
@given(data=st.data())
def test_parse_is_the_inverse_of_every_topic_function(kind: str, data: st.DataObject) -> None:
    address = data.draw(ADDRESSES[kind])
    assert FLEET.parse(SPELL[address.kind](address)) == address


levels = st.one_of(
    st.sampled_from(
        "srv state tuf art round d dn up want cmd ack echo meta rpt blob req log rsp enroll sum".split()
    ),
    st.sampled_from(
        ["", "+", "#", "0", "1", "16", "007", "٣", "²", "-1", "A", "a b", "a\n", "1\n", "a" * 33, SHA]
    ),
    st.sampled_from(
        [SHA.upper(), SHA[:-1] + "g", SHA + "\n", "root.json", "0.root.json", "1.root.json\n", "x.json"]
    ),
    names,
)


@given(st.lists(levels, min_size=1, max_size=7))
def test_what_parse_accepts_is_spelt_the_same_again(path: list[str]) -> None:
    topic = "/".join([FLEET.root, *path])
    try:
        address = FLEET.parse(topic)
    except ProtocolError:
        return
    assert SPELL[address.kind](address) == topic


@every_kind
@few
@given(data=st.data())
def test_a_topic_with_one_wrong_level_is_refused_or_is_another_topic(kind: str, data: st.DataObject) -> None:
    address = data.draw(ADDRESSES[kind])
    path = SPELL[address.kind](address).split("/")
    place = data.draw(st.integers(0, len(path) - 1))
    wrong = data.draw(levels.filter(lambda level: level != path[place]))
    topic = "/".join([*path[:place], wrong, *path[place + 1 :]])
    try:
        other = FLEET.parse(topic)
    except ProtocolError:
        return
    assert other != address
    assert SPELL[other.kind](other) == topic


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "efl/1/main",
        "efl/1/main/",
        "efl/2/main/srv/state",
        "efl/1/other/srv/state",
        "efl/1/mainsrv/state",
        "$SYS/broker/uptime",
        "efl/1/main/srv/state/",
        "efl/1/main/d/+/up/state",
        "efl/1/main/d/pi-1/up/#",
        "efl/1/main/d/pi-1/dn/state",
        "efl/1/main/d/pi-1/up/want",
        "efl/1/main/d/Pi-1/up/state",
        "efl/1/main/d/pi-1\n/up/state",
        "efl/1/main/d/pi-1/up/rpt/digits/٣",
        "efl/1/main/d/pi-1/up/rpt/digits/03",
        f"efl/1/main/d/pi-1/up/rpt/digits/{'9' * 5000}",
        f"efl/1/main/art/{SHA}/0/16",
        f"efl/1/main/art/{SHA}/1/0",
        f"efl/1/main/art/{SHA.upper()}/0/0",
        f"efl/1/main/art/{SHA}\n/0/0",
        f"efl/1/main/art/{SHA}/0/0\n",
        "efl/1/main/tuf/../state",
        "efl/1/main/tuf/01.root.json",
    ],
)
def test_a_foreign_topic_is_refused(topic: str) -> None:
    with pytest.raises(ProtocolError, match=r"; ignored$"):
        FLEET.parse(topic)


def test_a_refused_topic_still_names_its_device() -> None:
    assert FLEET.sender("efl/1/main/d/pi-1/up/nonsense/#") == "pi-1"
    assert FLEET.sender(f"efl/1/main/d/{'x' * 999}") == "x" * 32
    assert FLEET.sender("efl/1/main/round/d/pi-1") == ""
    assert FLEET.sender("d") == ""


def test_subscriptions_match_what_they_are_for_and_no_more() -> None:
    assert topic_matches_sub(FLEET.up("+", "#"), FLEET.up("pi-1", "rpt", "digits", 3))
    assert not topic_matches_sub(FLEET.up("+", "#"), FLEET.down("pi-1", "assignment"))
    assert topic_matches_sub(FLEET.up("+", "sum", "#"), FLEET.up("pi-1", "sum"))
    assert topic_matches_sub(FLEET.up("+", "sum", "#"), FLEET.up("pi-1", "sum", "sum-1", 3))
    assert not topic_matches_sub(FLEET.up("+", "sum", "#"), FLEET.up("pi-1", "log"))
    assert topic_matches_sub(FLEET.down("pi-1", "#"), FLEET.down("pi-1", "ack"))
    assert not topic_matches_sub(FLEET.down("pi-1", "#"), FLEET.down("pi-2", "ack"))
    group = FLEET.chunk_group(SHA, 1)
    assert [i for i in range(4 * GROUP) if topic_matches_sub(group, FLEET.chunk(SHA, i))] == list(
        range(GROUP, 2 * GROUP)
    )
    assert topic_matches_sub(FLEET.round("+"), FLEET.round("digits"))


def allowed(who: str, right: str, topic: str) -> bool:
    """Whether the rules let `who` ("server" or a device's name) do this, read as mosquitto reads them."""
    role = "server" if who == "server" else "device"
    return any(
        topic_matches_sub(pattern.replace("%u", who), topic)
        for party, rights, pattern in access_rules("main")
        if party == role and rights in (right, "readwrite")
    )


@pytest.mark.parametrize("kind", [kind for kind in ADDRESSES if not kind.startswith("enrol")])
@few
@given(data=st.data())
def test_each_side_may_write_its_own_topics_and_read_the_other_sides(kind: str, data: st.DataObject) -> None:
    address = data.draw(ADDRESSES[kind])
    topic, me = SPELL[kind](address), address.device or "pi-1"
    writer, _ = TOPICS[kind]
    assert allowed("server", "write", topic) and allowed("server", "read", topic)
    assert allowed(me, "write", topic) is (writer != "server")
    assert allowed(me, "read", topic) is (writer != "device")


@pytest.mark.parametrize("kind", sorted(ADDRESSES.keys() - OF_NO_DEVICE))
@few
@given(data=st.data(), other=names)
def test_no_device_reads_or_writes_for_another(kind: str, data: st.DataObject, other: str) -> None:
    topic = SPELL[kind](data.draw(ADDRESSES[kind].filter(lambda address: address.device != other)))
    assert not allowed(other, "write", topic) and not allowed(other, "read", topic)


@given(st.text(max_size=40))
def test_only_a_valid_name_can_be_part_of_a_topic(text: str) -> None:
    if NAME.match(text):
        assert checked(text) == text
    else:
        with pytest.raises(ProtocolError, match="nothing was sent"):
            checked(text, "device")


@pytest.mark.parametrize(
    "name",
    [
        *RESERVED,
        *(f"{beginning}ann" for beginning in PREFIXES),
        "--help",
        "-h",
        "-",
        "",
        "a b",
        "a" * 33,
        "é",
        "a\n",
    ],
)
def test_no_device_has_a_reserved_name_or_one_that_a_command_takes_for_an_option(name: str) -> None:
    with pytest.raises(InputError, match="expected"):
        checked_device(name)
    assert checked_device("pi-07") == "pi-07"
