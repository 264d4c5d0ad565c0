"""The fixtures of the server's tests."""

from tests.server.conftest import bench, broker, clock, own_mosquitto, real_bench, stage

__all__ = ["bench", "broker", "clock", "own_mosquitto", "real_bench", "stage"]
