"""Fixtures of the failure tests: the server's bench on a mosquitto of its own."""

from tests.server.conftest import own_mosquitto, real_bench

__all__ = ["own_mosquitto", "real_bench"]
