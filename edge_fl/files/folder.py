"""List the regular files below a folder; everything else in it is returned with the reason why it cannot be used.

Links to folders are followed, also to other disks; every folder is read once. Nothing is opened, so that a FIFO or a device cannot block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from edge_fl.files.paths import text

UNREADABLE = "unreadable"
UNREADABLE_FOLDER = "unreadable folder"
NOT_REGULAR = "not a regular file"
BROKEN_LINK = "a broken link"
CIRCLE = "a link that leads to itself"
READ_ALREADY = "a link to a folder that is read already"
ABOVE = "a link to a folder around this one"

SYSTEM_FOLDERS = (
    "@eadir", "@tmp", "#recycle", "#snapshot",  # Synology
    "@recycle", "@recently-snapshot",  # QNAP
    "__macosx", ".appledouble", ".spotlight-v100", ".fseventsd", ".trashes", ".temporaryitems", ".documentrevisions-v100",
    "network trash folder", "temporary items",  # macOS
    "$recycle.bin", "recycler", "recycled", "system volume information",  # Windows
    "lost+found", ".trash-*", ".snapshot", ".snapshots",  # Linux
)  # fmt: skip
"""Names of folders that operating systems and network drives make, in lower case; docs/devices.md lists them."""
SYSTEM_FILES = (
    "thumbs.db",
    "ehthumbs.db",
    "desktop.ini",
    ".ds_store",
    "._*",
    "*@synoeastream",
    "*@synoresource",
    "icon\r",
)
"""The same for files."""


@dataclass(frozen=True)
class FolderListing:
    """`files` and `skipped` (with reasons) are sorted; `folders` are the names directly below the root, without hidden and system ones.

    `system` counts the system's folders and files by name; they are neither in `files` nor in `skipped`.
    """

    files: list[Path] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    system: Counter[str] = field(default_factory=Counter)

    @property
    def system_remark(self) -> str:
        """How many folders and files of operating systems were left out, with their names; "" for none."""
        found = ", ".join(sorted(map(text, self.system)))
        return (
            f"{self.system.total()} folders and files of operating systems were ignored: {found}"
            if found
            else ""
        )


Identity = tuple[int, int]
"""Device and inode of a folder."""


def walk(root: Path) -> FolderListing:
    """List the files below `root`, without hidden files and folders and those of systems (SYSTEM_FOLDERS, SYSTEM_FILES)."""
    listing, links = FolderListing(), list[Path]()
    try:
        around = {_identity(parent) for parent in root.resolve().parents}
        read = {_identity(root)}
    except (OSError, RuntimeError):  # RuntimeError: a link in a circle, before Python 3.13
        listing.skipped.append((root, UNREADABLE_FOLDER))
        return listing
    _list(root, listing, links, read)
    while links:  # after the folders themselves: a link to one of them is the one to leave out
        batch, links = sorted(links), []
        for link in batch:
            try:
                identity = _identity(link)
            except OSError:
                listing.skipped.append((link, UNREADABLE_FOLDER))
                continue
            if identity in around or identity in read:
                listing.skipped.append((link, ABOVE if identity in around else READ_ALREADY))
                continue
            read.add(identity)
            _list(link, listing, links, read, linked=True)
            if link.parent == root:
                listing.folders.append(link.name)
    for found in (listing.files, listing.folders, listing.skipped):
        found.sort()
    return listing


def _list(
    top: Path, listing: FolderListing, links: list[Path], read: set[Identity], *, linked: bool = False
) -> None:
    """List the files below `top`; collect the links to folders. `linked`: a folder in it may have been read already."""
    folders = [top]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as found:
                entries = [
                    (entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in found
                ]
        except OSError:
            listing.skipped.append((folder, UNREADABLE_FOLDER))
            continue
        for name, is_folder, is_link in entries:
            path = folder / name
            leads_to_folder = is_folder or (is_link and _is_folder(path))
            if system := _system_name(name, SYSTEM_FOLDERS if leads_to_folder else SYSTEM_FILES):
                listing.system[system] += 1
            elif name.startswith("."):
                continue
            elif is_folder:
                try:
                    identity = _identity(path)
                except OSError:
                    listing.skipped.append((path, UNREADABLE_FOLDER))
                    continue
                if linked and identity in read:
                    listing.skipped.append((path, READ_ALREADY))
                    continue
                read.add(identity)
                folders.append(path)
                if folder == top and not linked:
                    listing.folders.append(name)
            elif leads_to_folder:
                links.append(path)
            elif reason := unusable(path):
                listing.skipped.append((path, reason))
            else:
                listing.files.append(path)


def is_system(name: str) -> bool:
    """Whether a folder of this name is one that an operating system or a network drive made."""
    return bool(_system_name(name, SYSTEM_FOLDERS))


def unusable(path: Path) -> str:
    """Return why a file must not be opened: a FIFO, a socket, a device, a broken link; "" for a regular file."""
    try:
        return "" if stat.S_ISREG(path.stat().st_mode) else NOT_REGULAR
    except OSError as error:
        if error.errno == errno.ELOOP:
            return CIRCLE
        return BROKEN_LINK if error.errno == errno.ENOENT and path.is_symlink() else UNREADABLE


def _system_name(name: str, patterns: tuple[str, ...]) -> str:
    """The name under which a system's folder or file is counted; "" for any other."""
    lower = name.lower()
    found = next((pattern for pattern in patterns if fnmatchcase(lower, pattern)), "")
    return found.rstrip("\r") if "*" in found else found and name.rstrip("\r")


def _is_folder(link: Path) -> bool:
    try:
        return stat.S_ISDIR(link.stat().st_mode)
    except OSError:
        return False


def _identity(folder: Path) -> Identity:
    found = folder.stat()
    return found.st_dev, found.st_ino
