"""Memory: how many clients `ClientCapacity` puts into one computation, and the peak of a round."""

from collections.abc import Iterator

import torch

from edge_fl_server.training.engines.vector import VectorClients
from tools.bench import workloads
from tools.bench.accelerator.scale import Scale, forget_peak, peak_mb
from tools.bench.figures import Figure
from tools.bench.measure import take_turns
from tools.bench.training import Round


def figures(turns: int, at: Scale) -> Iterator[Figure]:
    """One figure per model; `turns` does not apply."""
    for model, clients in zip(at.models, at.crowd, strict=True):
        yield chunk(model, clients, at)


def chunk(model: str, clients: int, at: Scale) -> Figure:
    """The chunk size after two rounds, of which the first measures the memory of a client."""
    forget_peak(at.device)
    study = workloads.many(clients, model=model)
    once = Round(study, "vector", at.device)
    times = take_turns({"vector": once}, 1)
    assert isinstance(once.fleet, VectorClients)
    found = once.fleet.capacity.clients
    notes: dict[str, float | str] = {"clients": float(clients), "peak MB": peak_mb(at.device)}
    if at.real:
        notes["memory MB"] = torch.cuda.mem_get_info(at.device)[1] / 1e6
    what = f"clients per chunk of {clients}, {model}"
    return Figure(f"memory {model}", what, unit=" clients", value=float(found), sides=times, notes=notes)
