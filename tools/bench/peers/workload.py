"""Writes a job: synthetic images, PFLlib's split, initial weights, and the batches that edge-fl draws in round 1."""

import json
from pathlib import Path

import numpy as np

from edge_fl.data.partition import Split
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import BUFFER
from edge_fl.methods import build_method
from edge_fl_server.training.studies import ClientStore, Study
from tools.bench.peers import split
from tools.bench.peers.cases import CASES, Case
from tools.bench.peers.job import CLASSES, DATASET
from tools.bench.peers.ours import recipe
from tools.bench.peers.pfllib_arguments import DEFAULTS
from tools.bench.workloads import LR, images

SEED = 1


def write(folder: Path, name: str, quick: bool) -> int:
    """Write the job of a case; returns the number of steps of an epoch over all clients."""
    case = CASES[name]
    size = case.size(quick)
    dataset = images(size.images, InputSpec(size.shape))
    clients = split.draw(dataset.samples.y, size, np.random.default_rng(SEED))
    split.write(folder / "dataset" / DATASET, dataset, clients)
    (folder / "system").mkdir()  # PFLlib reads ../dataset
    np.savez(folder / "images.npz", x=dataset.samples.x, y=dataset.samples.y)
    trains, tests = zip(*clients, strict=True)
    none = tuple(np.empty(0, np.int64) for _ in clients)
    ids = tuple(f"c{client:03}" for client in range(size.clients))
    rows = Split(size.images, ids, trains, none, tests)
    rows.save(folder / "split.npz")
    store = ClientStore.of(Study(recipe(case, size.clients, size.shape), dataset, rows))
    parts = build_method(store.settings.spec).net.parts
    start = [
        tensor.numpy()
        for part in ("extractor", "head")
        for name, tensor in parts[part].init().items()
        if not name.startswith(BUFFER)
    ]
    np.savez(folder / "start.npz", *start)
    orders = {f"{number}": _order(store, id, case) for number, id in enumerate(ids)}
    np.savez(folder / "order.npz", **orders)
    arguments = {
        **DEFAULTS,
        "dataset": DATASET,
        "num_classes": CLASSES,
        "num_clients": size.clients,
        "batch_size": split.BATCH_SIZE,
        "local_learning_rate": LR,
        "local_epochs": 1,
        "global_rounds": 1_000_000,
        **case.arguments,
    }
    settings = {
        "case": name,
        "clients": size.clients,
        "shape": size.shape,
        "lr": LR,
        "batch_size": split.BATCH_SIZE,
        "arguments": arguments,
    }
    (folder / "job.json").write_text(json.dumps(settings))
    return sum(len(train) for train in trains) // split.BATCH_SIZE


def _order(store: ClientStore, id: str, case: Case) -> np.ndarray:
    """The rows of the batches of round 1 in all stages, int64 [epochs, batches, batch size]."""
    batches = store[id].batches(1)
    return np.stack(
        [np.stack(epoch) for stage, epochs in case.stages for epoch in batches.order(stage, epochs)]
    )
