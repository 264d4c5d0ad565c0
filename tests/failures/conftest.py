"""The server's bench over a mosquitto of its own, for whoever breaks things around it."""

from tests.server.conftest import own_mosquitto, real_bench

__all__ = ["own_mosquitto", "real_bench"]
