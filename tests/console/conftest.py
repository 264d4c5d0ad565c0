"""The fixtures of the server's tests."""

from tests.server.conftest import bench, broker, clock, own_mosquitto, real_bench, stage
from tests.server.registry.conftest import database_url  # noqa: F401

__all__ = ["bench", "broker", "clock", "own_mosquitto", "real_bench", "stage"]
