"""Rules for class names: a device finds the pictures of a class in the folder of this name.

Names are compared in Unicode's composed form (`class_of`), so that a folder from a Mac is the class that it seems to be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from edge_fl.config import MAX_CLASSES
from edge_fl.errors import ConfigError
from edge_fl.files.folder import FolderListing
from edge_fl.files.paths import JOINERS, composed, is_utf8, text

LONGEST = 100  # characters
SKIPPED = "skipped: "
"""In a device's note about files that it does not use, before the reason."""
OUTSIDE = "in a folder that is not in the class list"
"""Begins the reason why a device skips a picture: it sends these reasons with counts, but no name of a folder."""
UNUSABLE = "in a folder whose name cannot be a class"
LEAST_FOR_GAP, LEAST_FOR_OTHER = 7, 8
"""Letters of names that count as similar if one has a letter more, or another letter: shorter words often differ so little."""
SEPARATORS = str.maketrans("", "", " _-.'")


def class_of(folder: str) -> str:
    """Return the class whose pictures are in a folder of this name: the name in composed form; "" for one that cannot be a class."""
    name = composed(folder)
    return "" if not is_utf8(folder) or flaw(name) else name


def require_class_names(names: Sequence[str], where: str) -> list[str]:
    """Return the names in composed form. Raises ConfigError unless they are two or more different names of folders.

    The message starts with `where`.
    """
    names = [composed(name) for name in names]
    if not 2 <= len(names) <= MAX_CLASSES:
        found = f"1 class ({names[0]})" if len(names) == 1 else f"{len(names)} classes"
        raise ConfigError(
            f"{where}: {found}, expected 2 to {MAX_CLASSES}, each the name of a folder of pictures"
        )
    for number, name in enumerate(names, 1):
        if found := flaw(name):
            raise ConfigError(f"{where}: class {number}, {name[:LONGEST]!r}, {found}")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{where}: class {repeated[0]!r} occurs more than once, expected different names")
    return names


def outside(folder: str, classes: Sequence[str]) -> str:
    """The reason to skip pictures of a folder outside the class list, with the nearest class: OUTSIDE, nearest 'horse'."""
    if not class_of(folder):
        return UNUSABLE
    near = nearest_class(folder, classes)
    return f"{OUTSIDE}, nearest {near!r}" if near else OUTSIDE


def nearest_class(folder: str, classes: Sequence[str]) -> str:
    """The class whose name is similar to that of a folder, ignoring case; "" if none is."""
    by_name = {name.casefold(): name for name in classes}
    near = get_close_matches(composed(folder).casefold(), by_name, n=1)
    return by_name[near[0]] if near else ""


def flaw(name: str) -> str:
    """Return why this cannot be the name of a class; "" if it can."""
    if not name.strip():
        return "is empty; expected the name of a folder of pictures"
    if name != name.strip():
        return "begins or ends with a space"
    if len(name) > LONGEST:
        return f"has {len(name)} characters, at most {LONGEST}"
    printable = all(char.isprintable() or char in JOINERS for char in name)
    if "/" in name or name.startswith(".") or not printable:
        return (
            "cannot be the name of a folder of pictures (no '/', no '.' at the start, no control characters)"
        )
    return ""


def folder_remarks(listing: FolderListing, classes: Sequence[str] = ()) -> Iterator[str]:
    """Remarks about a folder of pictures by class, for its owner only: names that cannot be classes, similar ones, system folders.

    Similar names are those of the `classes`, if they are known: for other folders there is `nearest_class`.
    """
    for name in listing.folders:
        if not class_of(name):
            why = "is not UTF-8" if not is_utf8(name) else flaw(composed(name))
            yield f"folder '{text(name)}': its name {why}, so it is no class; rename it"
    holding = {path.parent.name for path in listing.files}.intersection(listing.folders)
    names = {name for folder in holding if (name := class_of(folder))}
    yield from similar_remarks(sorted(names.intersection(classes or names)))
    if listing.system_remark:
        yield listing.system_remark


def similar_remarks(names: Sequence[str]) -> Iterator[str]:
    """A remark for every group of classes that may be one: 'Pear', 'pear' and 'pears'; not the members of a series such as cat1, cat2."""
    for group in similar(names):
        *most, last = (repr(name) for name in group)
        yield (
            f"classes {', '.join(most)} and {last} are similar; if they are the same, put them in one folder"
        )


def similar(names: Sequence[str]) -> list[list[str]]:
    """Groups of names that differ only in case, spaces, a plural, or a typing error in a long word."""
    group = {name: name for name in names}
    by_key: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        if len(name) > 1:  # 'a' and 'A' are different characters
            by_key[name.casefold().translate(SEPARATORS)].append(name)

    def join(one: str, other: str) -> None:
        old, new = group[one], group[other]
        for name in names:
            if group[name] == old:
                group[name] = new

    gaps: dict[tuple[int, str], str] = {}  # each name without one letter
    for key, same in by_key.items():
        for name in (*same[1:], *(by_key[other][0] for other in _misspelt(key) if other in by_key)):
            join(name, same[0])
        if len(key) >= LEAST_FOR_OTHER and key.isalpha():
            for place in range(1, len(key) - 1):
                join(same[0], gaps.setdefault((place, key[:place] + key[place + 1 :]), same[0]))
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        found[group[name]].append(name)
    return [sorted(same) for same in found.values() if len(same) > 1]


def _misspelt(key: str) -> Iterator[str]:
    """Forms of a word, in lower case without spaces, that may stand for it: its singular, and what a typing error makes of a long one."""
    if len(key) > 3 and key.isalpha():
        if key.endswith("ies"):
            yield key[:-3] + "y"
        if key.endswith("es"):
            yield key[:-2]
        if key.endswith("s") and not key.endswith("ss"):
            yield key[:-1]
    if len(key) >= LEAST_FOR_GAP and key.isalpha():
        yield from (key[:place] + key[place + 1 :] for place in range(1, len(key)))
        yield from (
            key[:place] + key[place + 1] + key[place] + key[place + 2 :] for place in range(len(key) - 1)
        )
