"""What is refused is refused with a warning, ten thousand times over: here nobody reads it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings are not even kept; an error still is."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
