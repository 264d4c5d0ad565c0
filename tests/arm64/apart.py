"""Run a program in an aarch64 root, as root of its own user, mount and process namespaces.

`python apart.py ROOT PROGRAM ARGUMENT...`. In there a private binfmt_misc lets the kernel start aarch64 programs under qemu, child
processes too (Linux 6.7 or newer). 65536 users exist in there, so that files can have owners; mapping those takes root outside.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
# a 64-bit little-endian program for aarch64
MAGIC = r"\x7fELF\x02\x01\x01" + 9 * r"\x00" + r"\x02\x00\xb7\x00"
MASK = 7 * r"\xff" + r"\x00" + 8 * r"\xff" + r"\xfe\xff\xff\xff"
SETUP = r"""
set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' ':edge-fl:M::@MAGIC@:@MASK@:/usr/bin/qemu-aarch64-static:FC' \
  >/proc/sys/fs/binfmt_misc/register
root=$1; shift
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
[ ! -f "$root/etc/cpuinfo" ] || mount --bind "$root/etc/cpuinfo" "$root/proc/cpuinfo"
exec chroot "$root" "$@"
""".replace("@MAGIC@", MAGIC).replace("@MASK@", MASK)


def main(arguments: list[str]) -> int:
    """Exit with the program's status."""
    ready, go = os.pipe(), os.pipe()
    parent = os.fork()
    if parent:
        os.read(ready[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{parent}/{name}").write_text("0 0 65536\n")
        os.write(go[1], b"g")
        _, status = os.waitpid(parent, 0)
        return os.waitstatus_to_exitcode(status)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    os.write(ready[1], b"r")
    os.read(go[0], 1)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no process in there outlives this one
    with subprocess.Popen(["sh", "-c", SETUP, "sh", *arguments]) as first:  # process 1 of the new namespace
        return first.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
