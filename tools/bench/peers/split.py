"""PFLlib's division of images over clients, and its dataset files."""

from pathlib import Path

import numpy as np

from edge_fl.data.samples import Dataset
from tools.bench.peers.cases import Size

BATCH_SIZE = 10
TRAINING = 0.75
ATTEMPTS = 10_000


def draw(y: np.ndarray, size: Size, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of each client's training and test images, ascending.

    The rule of PFLlib's generator: class by class, Dirichlet shares among the clients that have less than an equal part so far; again until
    each client has enough images for a test batch. Unlike there, a training set is a whole number of batches, since PFLlib drops the rest.
    """
    least = min(BATCH_SIZE / (1 - TRAINING), len(y) / size.clients / 2)
    for _ in range(ATTEMPTS):
        clients = _dirichlet(y, size, rng)
        if min(map(len, clients)) >= least:
            return [_divided(rng.permutation(rows)) for rows in clients]
    raise ValueError(f"no split of {len(y)} images with {least:g} for each client in {ATTEMPTS} attempts")


def _dirichlet(y: np.ndarray, size: Size, rng: np.random.Generator) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in range(size.clients)]
    held = np.zeros(size.clients, np.int64)
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        shares = rng.dirichlet(np.full(size.clients, size.alpha)) * (held < len(y) / size.clients)
        ends = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
        for client, piece in enumerate(np.split(rows, ends)):
            parts[client].append(piece)
            held[client] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _divided(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    training = int(TRAINING * len(rows))
    whole = training - training % BATCH_SIZE
    return np.sort(rows[:whole]), np.sort(rows[training:])


def write(folder: Path, dataset: Dataset, clients: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write `train/<client>.npz` and `test/<client>.npz` as PFLlib reads them: pixels in -1..1, float32."""
    for position, part in enumerate(("train", "test")):
        (folder / part).mkdir(parents=True)
        for client, rows in enumerate(clients):
            chosen = rows[position]
            x = (dataset.samples.x[chosen].astype(np.float32) / 255 - 0.5) / 0.5
            data = {"x": x, "y": dataset.samples.y[chosen]}
            np.savez_compressed(folder / part / f"{client}.npz", data=np.array(data, dtype=object))
