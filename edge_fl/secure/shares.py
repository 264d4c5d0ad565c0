"""Shamir's secret sharing of 16-byte seeds, by PyCryptodome (in the field of 2^128 elements).

Shares belong to the names of a cohort in ascending order.
"""

from collections.abc import Mapping, Sequence

from Crypto.Protocol.SecretSharing import Shamir


def split(seed: bytes, threshold: int, names: Sequence[str]) -> dict[str, bytes]:
    """One share of a seed for each name; any `threshold` of them give the seed."""
    shares = Shamir.split(threshold, len(names), seed)
    return {names[index - 1]: share for index, share in shares}


def combine(shares: Mapping[str, bytes], threshold: int, names: Sequence[str]) -> bytes:
    """The seed of at least `threshold` shares."""
    places = {name: place for place, name in enumerate(names, 1)}
    points = [(places[name], share) for name, share in sorted(shares.items())]
    return bytes(Shamir.combine(points[:threshold]))
