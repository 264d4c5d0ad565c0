"""The limit on open files and sockets of this process."""

import resource

from edge_fl.errors import InputError

SPARE = 64  # other than sockets: libraries, logs, children


def require(sockets: int, who: str) -> None:
    """Raise the soft limit so that `sockets` more can be opened. Raises InputError if the hard limit is lower."""
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
    """Raise the soft limit to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
