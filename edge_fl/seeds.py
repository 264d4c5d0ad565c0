"""Seeds: the hash of run, purpose, round and client, for everything random.

The plain loop, the vectorised engine and devices therefore draw the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_for(run: int, purpose: str, round: int = 0, client: str = "") -> int:
    """A seed in [0, 2**63) for one purpose of one client in one round."""
    key = f"{run}\x1f{purpose}\x1f{round}\x1f{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(run: int, purpose: str, round: int = 0, client: str = "") -> np.random.Generator:
    """A NumPy generator with the seed of `seed_for`."""
    return np.random.default_rng(seed_for(run, purpose, round, client))
