"""Measure what training and evaluation cost, for the hours that `edge-fl recipes list` shows: `python -m tools.bench.costs`.

Processor time of one thread, so that other programs matter little: each network of the built-in recipes with FedAvg, and each method on one
network. Some minutes; writes server/edge_fl_server/recipes/costs.json. With names of methods, only these are measured and changed.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig, Option
from edge_fl.data.partition import DataConfig
from edge_fl.inputs import InputSpec
from edge_fl.methods import METHODS, build_method, hypers
from edge_fl.methods.contract import steps
from edge_fl_server import recipes
from edge_fl_server.recipes.hours import COSTS, DATASETS, Costs, MethodCost, NetworkCost, costs
from edge_fl_server.training.clients import Step
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.studies import ClientStore
from tools.bench import workloads

CLIENTS, FEW, MANY = 2, 1, 12  # batches of a client
REPEATS, LONG_S, SHORT_S = 5, 2.0, 0.5  # longer steps are measured once, shorter ones with many batches
LARGEST = 32  # batch that is measured: beyond it the cost of a sample hardly changes, but memory does
NETWORK, SHAPE, BATCH_SIZE = "cnn2", (3, 32, 32), 32  # on which methods are compared


def main(names: Sequence[str]) -> None:
    """Measure, and write the file."""
    torch.set_num_threads(1)
    base = seconds(ModelConfig(NETWORK), SHAPE, BATCH_SIZE)
    of_methods = {} if not names else dict(costs().methods)
    for name in names or METHODS:
        of_methods[name] = method_cost(name, base)
        print(name, of_methods[name], flush=True)
    found = replace(costs(), methods=of_methods) if names else Costs(processor(), of_networks(), of_methods)
    COSTS.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def of_networks() -> list[NetworkCost]:
    """Measure the networks of all built-in recipes."""
    networks = {}
    for name in recipes.names():
        recipe = recipes.find(name)
        if recipe.data.dataset in DATASETS and recipe.source == "simulated":
            shape = DATASETS[recipe.data.dataset][1]
            networks[recipe.model.name, shape, recipe.method.batch_size] = recipe.model
    measured = []
    for (name, shape, batch_size), model in networks.items():
        random = replace(model, weights="random" if ":" in name else "")
        found = NetworkCost(
            name, shape, batch_size, *map(rounded, seconds(random, shape, min(batch_size, LARGEST)))
        )
        print(found, flush=True)
        measured.append(found)
    return measured


def method_cost(name: str, base: tuple[float, float]) -> MethodCost:
    """The costs of a method in those of FedAvg."""
    known = hypers(name)
    head_epochs = int(known["head_epochs"][0]) if "head_epochs" in known else 0  # type: ignore[arg-type]
    options: dict[str, Option] = {"head_epochs": 1} if head_epochs else {}
    train, evaluate = seconds(ModelConfig(NETWORK), SHAPE, BATCH_SIZE, name, options)
    head = 0.0
    if head_epochs:
        more, _ = seconds(ModelConfig(NETWORK), SHAPE, BATCH_SIZE, name, {"head_epochs": 5})
        head = max(more - train, 0.0) / 4
    return MethodCost(
        rounded((train - head) / base[0]),
        rounded(evaluate / base[1]),
        rounded(head / base[0]),
        head_epochs,
    )


def seconds(
    model: ModelConfig,
    shape: tuple[int, int, int],
    batch_size: int,
    name: str = "fedavg",
    options: dict[str, Option] | None = None,
) -> tuple[float, float]:
    """Seconds to train a sample in one epoch, and to evaluate one."""
    train, evaluate, in_all = _seconds(model, shape, batch_size, name, options or {}, FEW)
    if in_all < SHORT_S:
        train, evaluate, _ = _seconds(model, shape, batch_size, name, options or {}, MANY)
    return train, evaluate


def _seconds(
    model: ModelConfig,
    shape: tuple[int, int, int],
    batch_size: int,
    name: str,
    options: dict[str, Option],
    batches: int,
) -> tuple[float, float, float]:
    """As `seconds`, then the duration of all training, with so many batches per client."""
    config = MethodConfig(name, 1, batch_size, OptimiserConfig("sgd", 0.01), options)
    data = DataConfig(clients=CLIENTS, partition="iid")
    study = workloads.study(model, InputSpec(shape), CLIENTS * batches * batch_size, data, config)
    store = ClientStore.of(study)
    method = build_method(store.settings.spec)
    now, shared = method.at(1), steps.start(method)
    clients = SequentialClients(dict(store), method)
    downs = {id: steps.broadcast(now, shared, id) for id in store}

    def best(step: Step) -> float:
        found: list[float] = []
        while len(found) < REPEATS and (not found or found[-1] < LONG_S):
            start = time.process_time()
            for _ in clients.each(step, 1, now, downs):
                pass
            found.append(time.process_time() - start)
        return min(found)

    trained = sum(store.samples(id) for id in store)
    tested = sum(len(store[id].data.test) for id in store)
    evaluated = best("evaluate") / tested if method.predicts_early or method.has_global else 0.0
    train = best("train")
    return train / trained, evaluated, train


def processor() -> str:
    """The name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "this machine")


def rounded(value: float) -> float:
    """Three digits: more would be noise."""
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main(sys.argv[1:])
