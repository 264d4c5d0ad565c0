"""Selectors: what an expression matches, and what a wrong one says."""

from collections.abc import Mapping, Sequence

import pytest

from edge_fl.fleet import tags
from edge_fl_server import selectors
from edge_fl_server.selectors import MAX_VALUES, Device, SelectorError, parse, require_groups

DEVICES: list[dict[str, str | float]] = [
    {"name": "pi-01", "site": "berlin", "tier": "full", "arch": "aarch64", "memory_mb": 8000, "samples": 0},
    {"name": "pi-02", "site": "berlin", "tier": "head", "arch": "armv7l", "memory_mb": 900},
    {"name": "pi-10", "site": "paris", "tier": "head", "arch": "aarch64", "memory_mb": 2000},
    {"name": "lab-1", "tier": "head", "arch": "x86_64"},
]
GROUPS = {"berlin": "site=berlin", "small": "@berlin and memory_mb<1000"}


def select(devices: Sequence[Device], text: str, groups: Mapping[str, str]) -> list[str]:
    matches = parse(text, groups).matches
    return [str(device["name"]) for device in devices if matches(device)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("site=berlin and (tier=full or not arch=armv7l)", "pi-01"),
        ("site=berlin or site=paris and tier=full", "pi-01 pi-02"),  # and binds tighter
        ("(site=berlin or site=paris) and tier=full", "pi-01"),
        ("site=paris,berlin", "pi-01 pi-02 pi-10"),
        ("site=*", "pi-01 pi-02 pi-10"),
        ("not site=*", "lab-1"),
        ("site!=berlin", "pi-10 lab-1"),  # also without the tag
        ("site=b?rlin", "pi-01 pi-02"),
        ("site=berli", ""),  # whole values
        ("site=Berlin", ""),
        ("pi-0*", "pi-01 pi-02"),
        ("pi-01,lab-*", "pi-01 lab-1"),
        ("name=pi-01", "pi-01"),
        ("not pi-*", "lab-1"),
        ("not not pi-01", "pi-01"),
        ("memory_mb>=2000", "pi-01 pi-10"),
        ("memory_mb < 2000", "pi-02"),
        ("memory_mb!=900", "pi-01 pi-10 lab-1"),
        ("samples=0", "pi-01"),  # absent elsewhere
        ("@berlin and tier=full", "pi-01"),
        ("not @small", "pi-01 pi-10 lab-1"),
        ("*", "pi-01 pi-02 pi-10 lab-1"),
        ("a.b/c=1", SelectorError),
    ],
)
def test_a_selector_matches(text: str, expected: str | type[Exception]) -> None:
    if isinstance(expected, str):
        assert select(DEVICES, text, GROUPS) == expected.split()
    else:
        with pytest.raises(expected):
            select(DEVICES, text, GROUPS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "position 1: ends, expected a device name"),
        ("  ", "position 3: ends"),
        ("site=berlin and", r"position 16: ends, expected a device name, key=value, @group, 'not' or '\('"),
        ("site=berlin tier=full", "position 13: 'tier', expected 'and', 'or' or the end"),
        ("site=", "position 6: ends, expected a value for site"),
        ("site==berlin", "position 6: '=', expected a value for site"),
        ("(site=berlin", r"position 13: ends, expected '\)'"),
        ("site=berlin)", "position 12"),
        ("site=berlin & tier=full", "position 13: '&', expected a device name"),
        ("and", "position 1: 'and', expected a device name"),
        (
            "site>3",
            "position 6: '3', expected = or != before it: site is no number or version, only release, samples",
        ),
        ("agnet<0.2.0", r"position 7: '0.2.0', .*agnet is no number or version.* \(did you mean 'agent'\?\)"),
        ("agent<new", "position 7: 'new', expected a version, such as 0.2.0: agent is one"),
        ("agent<0.2.*", "position 7: '0.2.*', expected a version"),
        ("agent<", "position 7: ends, expected a value for agent"),
        ("memory_mb>lots", "position 11: 'lots', expected a number: memory_mb is one"),
        ("Site=berlin", "position 1: 'Site', expected a key"),
        ("@berln", r"position 1: '@berln', expected a saved group \(did you mean 'berlin'\?\)"),
        ("@", "position 1: '@', expected"),
        ("@loop", "expected a group that does not contain itself: loop > ring > loop"),
        ("not " * 60 + "pi-01", "expected at most 50 levels"),
        ("(" * 60, "expected at most 50 levels"),
        ("x" * 1001, "1001 characters, expected at most 1000"),
    ],
)
def test_a_wrong_selector_names_the_position_and_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        parse(text, {**GROUPS, "loop": "@ring", "ring": "not @loop"})


def test_every_attribute_has_a_column() -> None:
    assert {*tags.ATTRIBUTES} == selectors.ATTRIBUTES.keys()


VERSIONS: list[dict[str, str | float]] = [
    {"name": "old", "agent": "0.1.0", "python": "3.9.2", "samples": 9},
    {"name": "pre", "agent": "0.2.0rc1", "python": "3.11.2", "samples": 80},
    {"name": "new", "agent": "0.2.0", "python": "3.13.5", "samples": 100},
    {"name": "newest", "agent": "0.10.0", "python": "3.11.2", "samples": 1000},
    {"name": "own", "agent": "our build", "python": "9" * 5000},
    {"name": "silent"},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("agent<0.2.0", "old pre"),  # 0.10.0 is newer than 0.2.0, a candidate older
        ("agent<=0.2.0", "old pre new"),
        ("agent>0.2.0", "newest"),
        ("agent>=0.2", "new newest"),  # 0.2 is 0.2.0
        ("agent=0.2", "new"),
        ("agent!=0.2.0", "old pre newest own silent"),
        ("agent=0.*", "old pre new newest"),  # a pattern compares the text
        ("agent=0.1.0,0.10.0", "old newest"),
        ("agent=our*", "own"),
        ("not agent>=0.2.0", "old pre own silent"),  # also devices whose version is not known
        ("python<3.11", "old"),
        ("samples<100", "old pre"),  # a number, not a text
        ("samples>=100 and agent>0.9", "newest"),
    ],
)
def test_versions_compare_as_versions_and_numbers_as_numbers(text: str, expected: str) -> None:
    assert select(VERSIONS, text, {}) == expected.split()


def nested(links: int, times: int) -> dict[str, str]:
    """Groups of which each names the one before `times` times."""
    return {"g0": "site=berlin"} | {f"g{n}": " or ".join([f"@g{n - 1}"] * times) for n in range(1, links + 1)}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (nested(3, 100), "at most 2,000 values"),  # a million comparisons, for every device
        (nested(40, 2), "at most 2,000 values"),
        (nested(400, 1), "at most 50 levels"),  # too deep for Python
        (
            {f"g{n}": "(" * 40 + f"@g{n - 1}" + ")" * 40 if n else "*" for n in range(400)},
            "at most 50 levels",
        ),
        ({f"g{n}": f"@g{n - 1}" if n else "not " * 40 + "*" for n in range(400)}, "at most 50 levels"),
        ({"g0": ",".join("a" * 490), "g1": " or ".join(["@g0"] * 5)}, "at most 2,000 values"),
    ],
)
def test_groups_within_groups_have_a_limit(groups: dict[str, str], message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        parse(f"@{list(groups)[-1]}", groups)
    with pytest.raises(SelectorError, match=message):
        require_groups(groups)


def test_groups_up_to_the_limit_match_also_if_a_group_was_parsed_at_a_smaller_depth() -> None:
    assert select(DEVICES, "@g49", nested(49, 1)) == ["pi-01", "pi-02"]
    assert select(DEVICES, "@g10", nested(10, 2)) == ["pi-01", "pi-02"]
    groups = {"deep": "not " * 30 + "site=paris", "outer": "(" * 30 + "@deep" + ")" * 30}
    for text in ("@deep or @outer", "@outer or @deep"):
        with pytest.raises(SelectorError, match="at most 50 levels"):
            parse(text, groups)
    assert select(DEVICES, "@deep and @deep", groups) == ["pi-10"]


class Counted(dict[str, str | float]):
    """A device that counts how often one of its values is compared."""

    compared = 0

    def get(self, *key: object) -> object:  # type: ignore[override]
        self.compared += 1
        return super().get(*key)  # type: ignore[call-overload]


def test_the_largest_selector_compares_a_bounded_number_of_values() -> None:
    """Counted, not timed: every value is compared at most once for a device."""
    device = Counted(DEVICES[0])
    groups = {"none": " or ".join(["x"] * 200), "all": " or ".join(["@none"] * 10)}
    assert select([device], "@all", groups) == [] and device.compared == MAX_VALUES
