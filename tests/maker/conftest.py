"""The fixtures of the devices' tests."""

from __future__ import annotations

from tests.devices.conftest import folder, server

__all__ = ["folder", "server"]
