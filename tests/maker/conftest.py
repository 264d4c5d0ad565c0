"""The fixtures of the devices' tests."""

from tests.devices.conftest import folder, server

__all__ = ["folder", "server"]
