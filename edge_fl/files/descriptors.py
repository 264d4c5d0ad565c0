"""How many files and sockets this process may have open: raised to what the system allows, or said in time that it is not enough."""

from __future__ import annotations

import resource

from edge_fl.errors import InputError

SPARE = 64  # beside the sockets: libraries, logs, children


def require(sockets: int, who: str) -> None:
    """Raises the soft limit so that `sockets` fit beside everything else. Raises InputError when the hard limit is lower."""
    needed = sockets + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"{who}: {needed} open files and sockets, but this process may have {hard};"
            f" expected a higher limit (ulimit -Hn, LimitNOFILE=)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def raise_most() -> None:
    """Raises the soft limit as far as it goes, for a child that takes as many clients as come."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
