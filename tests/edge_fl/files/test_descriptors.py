"""A process gets the sockets that it needs, or a word about why not before anything starts."""

import resource
from collections.abc import Iterator

import pytest

from edge_fl import process_limits
from edge_fl.errors import InputError


@pytest.fixture
def low() -> Iterator[int]:
    """The soft limit lowered for a while; the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_when_it_is_too_low(low: int) -> None:
    process_limits.require_sockets(300, "300 devices")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 300 + process_limits.SPARE


def test_a_hard_limit_that_is_too_low_is_named(low: int) -> None:
    if low == resource.RLIM_INFINITY:
        pytest.skip("no hard limit here")
    with pytest.raises(InputError, match=rf"may have {low}; .*nothing was changed"):
        process_limits.require_sockets(low, "a fleet")


def test_what_is_enough_stays_as_it_is(low: int) -> None:
    process_limits.require_sockets(10, "ten devices")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 256
