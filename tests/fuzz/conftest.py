"""Suppress warnings: every rejected input logs one, thousands of times."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log only errors."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
