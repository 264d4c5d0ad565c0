"""edge-fl with the engine that `auto` chooses, and the plain loop of the benchmark."""

import numpy as np

import edge_fl
from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig, Split
from edge_fl.data.samples import Dataset, Samples
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import BUFFER, Parts
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import PERSONAL, Method
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines import choice, processes
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import ClientStore, Study
from tools.bench import plain, workloads
from tools.bench.peers import split
from tools.bench.peers.cases import Case
from tools.bench.peers.job import Job, numbered
from tools.bench.peers.turns import Turns

ROUNDS = 1000  # a long run, for which `auto` calibrates


def edge(job: Job, turns: Turns) -> None:
    """The product's round loop on the engine that it chooses itself."""
    processes.prepare()  # as `edge-fl simulate` does
    store, reasons = _store(job), list[str]()
    method = build_method(store.settings.spec)
    fleet = choice.build("auto", store, method, Plan(ROUNDS), reasons.append)
    chosen = reasons[0].removeprefix("engine: ") if reasons else ""
    turns.about |= {"version": edge_fl.__version__, "setting": chosen.partition(" ")[0], "reason": chosen}
    turns.wait()
    for result in rounds.run(method, fleet, Plan(ROUNDS)):
        shared = result.shared
        turns.wait(lambda shared=shared: _weights(job, method, fleet, shared))


def plain_loop(job: Job, turns: Turns) -> None:
    """The benchmark's stand-in for PFLlib."""
    loop = plain.PlainLoop(_store(job), plain.fedavg)
    turns.about |= {"version": edge_fl.__version__}
    turns.wait()
    for number in range(1, ROUNDS):
        loop.round(number)
        turns.wait(lambda: numbered("shared", list(loop.server.parameters())))


def recipe(case: Case, clients: int, shape: tuple[int, int, int]) -> Recipe:
    """edge-fl's recipe of a case; training only, pixels in -1..1 as in PFLlib."""
    model = ModelConfig("tools.bench.networks:Pixels", {"hidden": 0}) if case.linear else ModelConfig("cnn2")
    optimiser = OptimiserConfig("sgd", workloads.LR)
    return Recipe(
        name="peers",
        rounds=1,
        evaluate_every=0,
        model=model,
        method=MethodConfig(case.method, case.epochs, split.BATCH_SIZE, optimiser, dict(case.options)),
        data=DataConfig(clients=clients),
        input=InputSpec(shape),
    )


def _store(job: Job) -> ClientStore:
    images = np.load(job.folder / "images.npz")
    classes = tuple(map(str, range(10)))
    dataset = Dataset("synthetic", Samples(images["x"], images["y"]), classes)
    settings = recipe(job.case, job.clients, job.shape)
    return ClientStore.of(Study(settings, dataset, Split.load(job.folder / "split.npz")))


def _weights(job: Job, method: Method, fleet: Clients, shared: Parts) -> dict[str, np.ndarray]:
    numbers = {id: number for number, id in enumerate(fleet.ids())}
    found = _numbered("shared", method, shared, job.case.shared)
    for id, own in fleet.personal_state() if job.case.own else ():
        found |= _numbered(f"own/{numbers[id]}", method, own, job.case.own)
    return found


def _numbered(prefix: str, method: Method, parts: Parts, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The parameters of some parts in the order in which the network defines them."""
    tensors = []
    for part in names:
        defined = method.net.parts[part.removeprefix(PERSONAL)].init()
        tensors += [parts[part][name] for name in defined if not name.startswith(BUFFER)]
    return numbered(prefix, tensors)
