"""Shares, masks and fixed-point numbers against Flower's `secure_aggregation`, an independent implementation of the same protocol.

Flower's pins (rich < 15, typer < 0.21, pycryptodome < 4) conflict with those of constraints.txt, so `make nightly` runs this file in an
environment of its own. Flower's generator of masks has a seed of 32 bits and serves only to compare what is done with masks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edge_fl.secure import fixed_point, masks
from edge_fl.secure.fixed_point import Numbers
from edge_fl.secure.terms import Member
from edge_fl.wire.messages import SumRequest
from tests.edge_fl.secure.cohorts import Cohort, names_of, vectors

flower = pytest.importorskip(
    "flwr.common.secure_aggregation", reason="an environment of its own: make nightly"
)

MODULUS = 2**fixed_point.BITS
SEED = bytes(range(16))


def test_flower_reconstructs_our_shares_and_we_reconstruct_flowers() -> None:
    from Crypto.Util.Padding import pad
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

    names = names_of(9)
    padded = pad(SEED, 16)  # Flower splits a padded secret, one block of 16 bytes after the other
    blocks = [masks.split_seed(padded[start : start + 16], 6, names) for start in (0, 16)]
    ours = [
        (place + 1).to_bytes(4, "little") + b"".join(block[name] for block in blocks)
        for place, name in enumerate(names)
    ]
    assert combine_shares(ours[2:8]) == SEED
    theirs = create_shares(SEED, 6, 9)
    assert (
        masks.combine_shares({name: theirs[place][4:20] for place, name in enumerate(names)}, 6, names)
        == SEED
    )


def test_masked_vectors_are_those_that_flower_computes(thirty: Mapping[str, Member]) -> None:
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    names, length = names_of(7), 200
    used: dict[str, list[bytes]] = {name: [] for name in names}

    def mask(key: bytes, length: int) -> Numbers:
        return pseudo_rand_gen(key, MODULUS, [(length,)])[0].astype(np.uint64)  # type: ignore[no-any-return]

    def options(name: str) -> dict[str, Any]:
        def stream(key: bytes, length: int) -> Numbers:
            used[name].append(key)
            return mask(key, length)

        return {"stream": stream}

    cohort = Cohort(
        thirty,
        vectors(7, length),
        SumRequest("statistics", 7, length),
        options=options,
        server_options={"stream": mask},
        gone={"survivors": ("pi-03",)},
    )
    result = cohort.run()
    assert np.abs(result.vector - np.sum(list(cohort.vectors.values()), axis=0)).max() <= 1e-6

    sent = [payload for payload in cohort.traffic if len(payload) == length * fixed_point.BYTES]
    for name, payload in zip(names, sent, strict=True):
        own, *pairs = used[name]
        masked = [fixed_point.encode(cohort.vectors[name], 7).astype(np.int64)]
        masked = parameters_addition(masked, pseudo_rand_gen(own, MODULUS, [(length,)]))
        for peer, key in zip([other for other in names if other != name], pairs, strict=True):
            change = parameters_addition if name < peer else parameters_subtraction
            masked = change(masked, pseudo_rand_gen(key, MODULUS, [(length,)]))
        (expected,) = parameters_mod(masked, MODULUS)
        assert (fixed_point.from_bytes(payload) == expected.astype(np.uint64)).all()


def test_fixed_point_numbers_agree_with_flowers_quantisation() -> None:
    from flwr.common.secure_aggregation.quantization import dequantize, quantize

    (vector,) = vectors(1, 500).values()
    vector = vector / np.abs(vector).max()
    target = 2**24
    (theirs,) = dequantize(quantize([vector], 1.0, target), 1.0, target)
    ours = fixed_point.decode(fixed_point.encode(vector, 30), 30)
    step = 2 / target
    assert np.abs(ours - vector).max() <= 2.0**-25
    assert np.abs(ours - theirs).max() <= step + 2.0**-25
