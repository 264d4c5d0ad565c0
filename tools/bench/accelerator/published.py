"""BlazeFL's published benchmark: FedAvg on CIFAR-10, 100 clients with 500 images of two classes each, 5 rounds of 5 epochs, batch 50.

Its authors need about 24.5 s on 32 cores and four RTX 6000 (CVPR-W 2026, read from their chart). As there, the clock starts after the data
has been loaded, images are cropped and flipped, and the global model is evaluated on 10,000 images after every round.
"""

import math
from collections.abc import Iterator

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data import partition
from edge_fl.data.partition import DataConfig
from edge_fl.inputs import InputSpec
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training.studies import Study
from tools.bench.accelerator import federation
from tools.bench.accelerator.scale import Scale, forget_peak, peak_mb
from tools.bench.figures import Figure
from tools.bench.measure import Times

TARGET_S, PUBLISHED_S = 5.0, 24.5
NETWORK = "tools.bench.networks:Small"


def study(clients: int, images: int, rounds: int, epochs: int) -> Study:
    """CIFAR-10 if EDGE_FL_DATA has it, else synthetic images of its size; a sixth of each client's images is for evaluation."""
    dataset = federation.images("cifar10", round(clients * images * 1.2), InputSpec((3, 32, 32)))
    data = DataConfig(
        clients=clients,
        partition="pathological",
        classes_per_client=2,
        test_fraction=1 / 6,
        validation_fraction=0.0,
    )
    method = MethodConfig("fedavg", epochs, 50, OptimiserConfig("sgd", 0.1), augment="crop")
    model = ModelConfig(NETWORK)
    recipe = Recipe(name="bench", rounds=rounds, evaluate_every=1, model=model, method=method, data=data)
    return Study(recipe, dataset, partition.split_clients(dataset, data, 0))


def figures(turns: int, at: Scale) -> Iterator[Figure]:
    """The whole job, in seconds; each turn includes the first round."""
    job = study(*at.published)
    forget_peak(at.device)
    runs = [list(federation.timed(job, at.device)) for _ in range(turns)]
    times = Times([math.fsum(round.seconds for round in run) for run in runs], [])
    clients, _, rounds, epochs = at.published
    what = f"BlazeFL's benchmark, {clients} clients, {rounds} rounds of {epochs} epochs, on {at.device}"
    notes: dict[str, float | str] = {
        "images": job.dataset.name,
        "each round, s": " ".join(f"{round.seconds:.3g}" for round in runs[0]),
        "accuracy": runs[0][-1].accuracy or 0.0,
        "peak MB": peak_mb(at.device),
    }
    yield Figure(
        "BlazeFL",
        what,
        TARGET_S,
        unit=" s",
        at_most=True,
        sides={"vector": times},
        ours="vector",
        value=times.median,
        notes=notes,
    )
