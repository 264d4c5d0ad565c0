"""Check the names of pictures: the bundle's manifest and, on a card, the FAT file system must be able to hold them."""

import re
from collections.abc import Iterable, Iterator

from edge_fl.errors import ConfigError, shortened

MAX_UNITS = 255  # UTF-16 code units of one name
MOST_NAMED = 5
NOT_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8
NOT_IN_FAT = re.compile(r'["*:<>?\\|\U00010000-\U0010ffff]')  # mtools cannot write the last range: emoji
DEVICES = re.compile(
    r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?", re.IGNORECASE
)  # reserved by Linux and Windows


def require_names(paths: Iterable[str], where: str, *, fat: bool) -> None:
    """Raise ConfigError that names the first few paths that cannot be written, to a FAT partition if `fat`."""
    if problems := list(_problems(paths, fat)):
        raise ConfigError(
            f"{where}: names that cannot be written: {shortened(problems, MOST_NAMED)}; expected other names",
            consequence="nothing was written",
        )


def _problems(paths: Iterable[str], fat: bool) -> Iterator[str]:
    written: dict[str, str] = {}  # every file and folder by its name in upper case
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            name, here = parts[end - 1], "/".join(parts[:end])
            key = _upper(here) if fat else here
            if key not in written:
                written[key] = here
                if problem := _problem(name, fat):
                    yield f"{here!r} ({problem})"
            elif written[key] != here:
                yield f"{here!r} (FAT does not distinguish it from {written[key]!r})"


def _problem(name: str, fat: bool) -> str:
    if NOT_TEXT.search(name):
        return "control characters, or not UTF-8"
    if not fat:
        return ""
    if found := NOT_IN_FAT.search(name):
        return f"contains {found[0]}, which FAT cannot hold"
    if name.endswith((".", " ")):
        return "ends in a dot or space, which FAT drops"
    if DEVICES.fullmatch(name):
        return "reserved for a device"
    units = len(name.encode("utf-16-le")) // 2
    return f"{units} characters, FAT holds {MAX_UNITS}" if units > MAX_UNITS else ""


def _upper(text: str) -> str:
    """Return upper case as FAT does, one character for one."""
    return "".join(up if len(up := character.upper()) == 1 else character for character in text)
