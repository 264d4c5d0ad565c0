"""Seeds depend on run, purpose, round and client only."""

import random
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.seeds import generator, seed_for

runs = st.integers(0, 2**63 - 1)
words = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-.", max_size=8)
rounds = st.integers(0, 10**6)
keys = st.tuples(runs, words, rounds, words)


def test_seeds_never_change_from_version_to_version() -> None:
    assert seed_for(0, "init") == 4384325198019981972
    assert seed_for(7, "batches", 3, "client-2") == 3824488746785746425


@given(keys, keys)
def test_different_keys_have_different_seeds(
    one: tuple[int, str, int, str], other: tuple[int, str, int, str]
) -> None:
    assert (seed_for(*one) == seed_for(*other)) == (one == other)


@given(keys)
def test_a_seed_fits_every_generator(key: tuple[int, str, int, str]) -> None:
    assert 0 <= seed_for(*key) < 2**63


def test_the_parts_of_a_key_do_not_run_into_one_another() -> None:
    near = [
        (1, "ab", 0, "c"),
        (1, "a", 0, "bc"),
        (11, "ab", 0, "c"),
        (1, "1ab", 0, "c"),
        (1, "ab", 1, "c"),
        (1, "ab", 0, "1c"),
        (1, "ab", 10, "c"),
        (1, "ab", 1, "0c"),
    ]
    assert len({seed_for(*key) for key in near}) == len(near)


def test_neither_order_nor_global_state_matters() -> None:
    clients = [f"client-{number}" for number in range(20)]
    forwards = {client: generator(0, "batches", 1, client).integers(2**62) for client in clients}
    random.Random(5).shuffle(clients)
    random.random()
    np.random.default_rng().random()
    backwards = {client: generator(0, "batches", 1, client).integers(2**62) for client in clients}
    assert forwards == backwards
    assert len(set(forwards.values())) == 20


def test_another_process_draws_the_same() -> None:
    code = (
        "from edge_fl.seeds import generator; print(generator(3, 'split', 0, 'pi').permutation(9).tolist())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout.strip() == str(generator(3, "split", 0, "pi").permutation(9).tolist())
