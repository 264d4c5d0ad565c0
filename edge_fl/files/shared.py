"""Owner, group and mode of files and folders that several accounts of a machine use, such as the pictures of a device.

Files that root makes belong to the owner of their folder, so that a command with sudo leaves nothing that this account cannot use. A shared
folder has the setgid bit: what is made in it belongs to its group and gets its mode, whatever the umask. For other programs (scp, Samba,
mkdir) its default access list does the same.

As a script, `python3 shared.py GROUP FOLDER` as root, it shares a folder. Imports only Python: install.sh runs it.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

SHARED_FOLDER, SHARED_FILE = 0o2070, 0o060  # what a shared folder, and a file in it, allow the group
DEFAULT_ACL = "system.posix_acl_default"
NO_ACL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
ANY_ID = 0xFFFFFFFF


def adopt(made: int, folder: Path, *, private: bool = False) -> None:
    """Give a file or folder that this process has made, by its descriptor, the owner, group and mode that those in `folder` have.

    A `private` one keeps its mode. What the file system or the account does not allow stays as it is.
    """
    above, now = folder.stat(), os.fstat(made)
    is_root, is_shared = os.geteuid() == 0, bool(above.st_mode & stat.S_ISGID)
    owner = above.st_uid if is_root else now.st_uid
    group = above.st_gid if is_root or is_shared else now.st_gid
    if (owner, group) != (now.st_uid, now.st_gid):
        with suppress(OSError):
            os.fchown(made, owner, group)
    if is_shared and not private:
        mode = stat.S_IMODE(above.st_mode) & (0o7777 if stat.S_ISDIR(now.st_mode) else 0o666)
        if stat.S_IMODE(os.fstat(made).st_mode) != mode:
            with suppress(OSError):
                os.fchmod(made, mode)


def adopt_path(made: Path, *, private: bool = False) -> None:
    """Like `adopt`, for a file or folder by its path."""
    with suppress(OSError):
        descriptor = os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            adopt(descriptor, made.parent, private=private)
        finally:
            os.close(descriptor)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, unless they exist; each adopts from the one above it. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():  # made by another process at this moment
            raise
    else:
        adopt_path(path, private=mode != 0o777)


def open_private(path: Path, flags: int) -> int:
    """Open a file of mode 0600, made if it does not exist. Return its descriptor. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CREAT, 0o600)
    adopt(descriptor, path.parent, private=True)
    return descriptor


def share(folder: Path, group: str) -> None:
    """Share a folder and all that is in it with a group, as root. Raises OSError, KeyError for an unknown group."""
    folder = folder.resolve()  # it may be a link itself
    gid = grp.getgrnam(group).gr_gid

    def change(descriptor: int, found: os.stat_result) -> None:
        is_folder = stat.S_ISDIR(found.st_mode)
        os.fchown(descriptor, -1, gid)
        mode = stat.S_IMODE(found.st_mode) | (SHARED_FOLDER if is_folder else SHARED_FILE)
        os.fchmod(descriptor, mode)
        if is_folder:
            try:
                os.setxattr(descriptor, DEFAULT_ACL, _access_list(mode))
            except OSError as error:
                if error.errno not in NO_ACL:  # then the setgid bit alone must do
                    raise

    _each(folder, change)


def unshare(folder: Path, uid: int, gid: int) -> None:
    """Give what belongs to the account `uid` or the group `gid` to the owner of the folder alone, as root. Raises OSError."""
    folder = folder.resolve()
    owner = folder.stat().st_uid
    with suppress(KeyError):
        own_group = pwd.getpwuid(owner).pw_gid

        def change(descriptor: int, found: os.stat_result) -> None:
            os.fchown(
                descriptor,
                owner if found.st_uid == uid else -1,
                own_group if found.st_gid == gid else -1,
            )
            if stat.S_ISDIR(found.st_mode) and found.st_gid == gid:
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~stat.S_ISGID)
                with suppress(OSError):
                    os.removexattr(descriptor, DEFAULT_ACL)

        _each(folder, change)


def is_foreign(folder: Path, group: str) -> bool:
    """Whether a folder belongs to a group other than root's, its owner's and `group`: it is shared already."""
    found = folder.stat()
    with suppress(KeyError):
        own = {0, grp.getgrnam(group).gr_gid, pwd.getpwuid(found.st_uid).pw_gid}
        return found.st_gid not in own
    return False


def become_owner(folder: Path) -> str:
    """As root, continue for good as the account that owns `folder`; return its name, "" if nothing changed. Raises OSError."""
    if os.geteuid() != 0 or not folder.is_dir() or not (uid := folder.stat().st_uid):
        return ""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return ""
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    os.environ |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    return account.pw_name


def _each(folder: Path, change: Callable[[int, os.stat_result], None]) -> None:
    """Call `change` for the folder and all folders and regular files in it, without following links."""
    for path, parent in _entries(folder):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOENT, errno.ENXIO):  # a link, gone, or a socket
                continue
            raise
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
                change(descriptor, found)
        finally:
            os.close(descriptor)


def _entries(folder: Path) -> Iterator[tuple[str, int | None]]:
    yield os.fspath(folder), None
    for _, folders, files, descriptor in os.fwalk(folder):
        for name in (*folders, *files):
            yield name, descriptor


def _access_list(mode: int) -> bytes:
    """A default access list: all rights for owner and group, those of `mode` for others."""
    entries = ((0x01, 7), (0x04, 7), (0x20, mode & 7))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, right, ANY_ID) for tag, right in entries)


def main(group: str, path: str) -> int:
    """Share a folder, unless it is shared already with another group. Return the exit code."""
    if is_foreign(Path(path), group):
        sys.stderr.write(f"{path}: belongs to another group; not shared with {group}\n")
        return 1
    share(Path(path), group)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
