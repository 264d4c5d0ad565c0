"""Flashing: what the target is, what it lacks, whether that fits, and then the writing, the words that start it all last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devices.flash import first_boot
from devices.flash.bundle import LOG, MANIFEST, File, listed, plan
from devices.flash.card_contents import CardContents
from devices.flash.targets.base import Target
from edge_fl.errors import ConfigError

CLUSTER_BYTES = 32768  # what the smallest file takes on a FAT partition, at most
SPARE_BYTES = 4 << 20
BOOT_FILES = ("cmdline.txt", "firstrun.sh", first_boot.USER_DATA)


@dataclass(frozen=True)
class Change:
    """One line of what is written, or would be."""

    what: str
    path: str
    bytes: int
    mode: str


def changes(
    target: Target, contents: Callable[[tuple[str, ...]], CardContents]
) -> tuple[list[File], list[str]]:
    """(files to write, files to remove) so that the target holds the bundle; both empty when it does. Raises ConfigError.

    `contents` is asked for once the target is known to be one, with the Pythons that it may have.
    """
    planned = plan(contents(target.pythons()))
    there = listed((target.read(MANIFEST) or b"").decode("utf-8", "replace"))
    wanted = listed(planned[-1].read().decode())
    new = [file for file in planned if file.path in wanted and there.get(file.path) != wanted[file.path]]
    old = [path for path in there if path not in wanted]
    if new or old:
        new.append(planned[-1])
    if target.boots:
        new += _boot_files(target, is_new=bool(new))
    _check_space(target, new)
    return new, old


def apply(target: Target, new: Sequence[File], old: Sequence[str]) -> None:
    """Writes; a cut in between leaves no manifest, so that the next flash begins anew. Raises RunError."""
    if not new:
        return
    target.remove([MANIFEST, *old])
    target.write(new)


def described(new: Sequence[File], old: Sequence[str]) -> list[Change]:
    """The same for a person: paths, sizes and modes, never contents."""
    removed = [Change("remove", path, 0, "") for path in old]
    return [*(Change("write", file.path, file.size, f"{file.mode:04o}") for file in new), *removed]


def _boot_files(target: Target, *, is_new: bool) -> list[File]:
    """What makes the card's first boot install the bundle; nothing when an older boot has, and nothing is new."""
    installed = target.read(LOG) is not None
    if installed and not is_new:
        return []
    cmdline, firstrun, user_data = (_text(target, name) for name in BOOT_FILES)
    edits = first_boot.edits(cmdline or "", firstrun, user_data, installed=installed)
    return [File(name, text.encode()) for name, text in edits.items() if _text(target, name) != text]


def _text(target: Target, name: str) -> str | None:
    content = target.read(name)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{target.name}: {name}: not UTF-8") from error


def _check_space(target: Target, new: Sequence[File]) -> None:
    need = sum(-(-file.size // CLUSTER_BYTES) * CLUSTER_BYTES for file in new) + SPARE_BYTES
    if new and need > (free := target.free_bytes()):
        raise ConfigError(
            f"{target.name}: {free / 1e6:.0f} MB are free; expected {need / 1e6:.0f} MB "
            "(--offline and --images take the most)"
        )
