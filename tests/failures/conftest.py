"""Fixtures of the failure tests: the server's bench on a mosquitto of its own, and the clock of its deadlines."""

from tests.server.conftest import clock, own_mosquitto, real_bench

__all__ = ["clock", "own_mosquitto", "real_bench"]
