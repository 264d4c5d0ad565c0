"""Suppress warnings: every rejected input logs one, thousands of times."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log only errors."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
