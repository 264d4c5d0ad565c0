"""PFLlib's quick start (MNIST, two convolutions, FedAvg, 20 clients, batch 10), compared with PFLlib on the same device and split.

Both sides evaluate every second round, so that one run shows rounds with and without evaluation; the figure is of those with it. PFLlib
evaluates accuracy, AUC and the loss of the training images, edge-fl the metrics of its reports.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_fl.config import ModelConfig
from edge_fl.data import partition
from edge_fl.data.partition import DataConfig
from edge_fl.inputs import InputSpec
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training.studies import Study
from tools.bench import workloads
from tools.bench.accelerator import federation, pfllib
from tools.bench.accelerator.scale import Scale, forget_peak, peak_mb
from tools.bench.figures import Figure
from tools.bench.measure import Times

TARGET = 30.0
TRAINED = 4  # rounds before the last evaluation
ROUNDS, EVALUATE_EVERY = TRAINED + 1, 2  # the first round of each side is not counted: it loads and warms up
PFLLIB = "PFLlib"
NOT_MEASURED = "not measured: no checkout given (PFLLIB=DIR)"


def study(clients: int, images: int) -> Study:
    """MNIST if EDGE_FL_DATA has it, else synthetic images of its size; PFLlib's split: Dirichlet 0.1, a quarter for testing."""
    dataset = federation.images("mnist", images, InputSpec((1, 28, 28)))
    data = DataConfig(
        clients=clients, partition="dirichlet", beta=0.1, test_fraction=0.25, validation_fraction=0.0
    )
    recipe = Recipe(
        name="bench",
        rounds=ROUNDS,
        evaluate_every=EVALUATE_EVERY,
        model=ModelConfig("cnn2"),
        method=workloads.method_config("fedavg"),
        data=data,
    )
    return Study(recipe, dataset, partition.split_clients(dataset, data, 0))


def figures(turns: int, at: Scale, checkout: Path | None) -> Iterator[Figure]:
    """The quick start; without a checkout only our side, as seconds per round."""
    federated = study(*at.start)
    ours: list[list[federation.Timed]] = []
    theirs: list[pfllib.Output] = []
    for _ in range(turns):
        forget_peak(at.device)
        if checkout:
            theirs.append(pfllib.train(checkout, federated, at.device, ROUNDS, EVALUATE_EVERY))
        ours.append(list(federation.timed(federated, at.device)))
    ours_evaluated, ours_trained = phases([[round.seconds for round in run] for run in ours], first=1)
    longest, rows = max(map(len, federated.split.train)), sum(map(len, federated.split.train))
    notes: dict[str, float | str] = {
        "images": federated.dataset.name,
        "for training": float(rows),
        "largest client": float(longest),
        "peak MB": peak_mb(at.device),
        "without evaluation, s": ours_trained.median,
        f"accuracy after {TRAINED} rounds": [round.accuracy for round in ours[0]][TRAINED - 1] or 0.0,
    }
    what = f"PFLlib's quick start, a round of {at.start[0]} clients with evaluation, on {at.device}"
    figure = Figure(
        "quick start", what, TARGET, ours="vector", theirs=PFLLIB, sides={"vector": ours_evaluated}
    )
    if checkout is None:
        notes[PFLLIB] = NOT_MEASURED
        yield msgspec.structs.replace(figure, target=0.0, unit=" s", value=ours_evaluated.median, notes=notes)
        return
    theirs_evaluated, theirs_trained = phases([run.seconds for run in theirs], first=0)
    notes |= {"PFLlib without evaluation, s": theirs_trained.median, "PFLlib's accuracy": theirs[0].accuracy}
    sides = {PFLLIB: theirs_evaluated, "vector": ours_evaluated}
    yield msgspec.structs.replace(figure, sides=sides, notes=notes)


def phases(runs: list[list[float]], first: int) -> tuple[Times, Times]:
    """The median of each run's rounds with and without evaluation, but for its first round; rounds are counted from `first`."""
    medians: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        for phase in range(EVALUATE_EVERY):
            chosen = [
                s
                for number, s in enumerate(run, first)
                if number % EVALUATE_EVERY == phase and number > first
            ]
            medians[phase].append(statistics.median(chosen))
    return Times(medians[0], []), Times(medians[1], [])
