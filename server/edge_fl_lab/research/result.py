"""The result of a run: every client's metrics as arrays and rows, the rounds, and the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from edge_fl import metrics
from edge_fl.console.units import percent
from edge_fl.data import arrays
from edge_fl.errors import DataError, InputError, nearest
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.contract import steps
from edge_fl.metrics import Summary
from edge_fl_lab.trained import TrainedRun
from edge_fl_server.orchestrate.execution import RunResult, torch_device
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks
from edge_fl_server.training.studies import Study

Values = NDArray[np.float64]
ACCURACIES = (metrics.PERSONAL_AFTER, metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)


@dataclass(frozen=True, eq=False)
class Result:
    """The result of one run.

    `clients` are the names of all clients, ascending; `metrics` maps each metric after the last round and the final personalisation to one
    value per client (NaN where it was not measured), `summary` to mean, std and bottom decile over clients. `rounds` has one dict per
    round: duration, traffic and the metrics' means. `trained` is the trained model with its data, `folder` that of the results, if one was
    requested. `note` says why the run ended early, if it did.
    """

    trained: TrainedRun
    clients: tuple[str, ...]
    metrics: Mapping[str, Values]
    summary: Mapping[str, Summary]
    rounds: list[dict[str, Any]]
    engine: str
    folder: Path | None = None
    note: str = ""
    _evaluated: Mapping[int, Mapping[str, Mapping[str, float]]] = field(default_factory=dict, repr=False)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.trained.recipe.method.name

    @property
    def accuracy(self) -> Values:
        """Test accuracy of each client's own model, after the final personalisation; else of the global model."""
        return next(self.metrics[name] for name in ACCURACIES if name in self.metrics)

    def rows(self) -> list[dict[str, Any]]:
        """A row per client, evaluated round and metric, with the final metrics in the last round: `pandas.DataFrame(result.rows())`."""
        return [
            {"method": self.method, "seed": self.trained.recipe.seed, "client": client, "round": round, "metric": name, "value": value}
            for round, reports in sorted(self._evaluated.items())
            for client, report in sorted(reports.items())
            for name, value in report.items()
        ]  # fmt: skip

    def predict(self, client: str, images: ArrayLike) -> NDArray[np.int64]:
        """Predict the class ids of images with a client's own model. Raises DataError."""
        run = self.trained
        if client not in run.personal:
            raise DataError(
                f"client {client!r} did not train{nearest(client, run.personal)}", "nothing was run"
            )
        pixels = arrays.pixels(np.asarray(images), "images")
        if pixels.shape[1:] != run.study.dataset.samples.shape:
            raise DataError(
                f"images of {list(pixels.shape[1:])}, expected {list(run.study.dataset.samples.shape)}",
                "nothing was run",
            )
        device = torch_device(run.recipe.device)
        own = to_device(run.personal[client], device)
        down = steps.broadcast(run.method, run.shared, client)
        x = torch.from_numpy(pixels).to(device)
        logits = in_batches(lambda batch: steps.predict(run.method, down, own, batch), x)
        classes: NDArray[np.int64] = logits.argmax(1).cpu().numpy()
        return classes

    def __repr__(self) -> str:
        own = self.accuracy[np.isfinite(self.accuracy)]
        lowest = metrics.summarise(own.tolist()).bottom_decile
        return (
            f"{self.method}: mean accuracy {percent(own.mean())}, bottom decile {percent(lowest)} (clients: {len(self.clients)},"
            f" rounds: {len(self.rounds)}, engine: {self.engine})"
        )


class ResultHooks(RunHooks):
    """Collect the rounds and the trained model of a run."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.engine = ""
        self.personal: dict[str, Parts] = {}
        self.final: FinalResult | None = None

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        means = metrics.summarise_reports(list(result.metrics.values()))
        self.rounds.append({
            "round": result.round,
            "seconds": result.seconds,
            "bytes_down": result.bytes_down,
            "bytes_up": result.bytes_up,
            "clients": len(result.responded),
            **{name: summary.mean for name, summary in means.items()},
        })  # fmt: skip

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        self.engine, self.final = clients.engine, result
        self.personal = dict(clients.personal_state())

    def result(self, study: Study, outcome: RunResult, folder: Path | None) -> Result:
        """The result of the run."""
        if self.final is None:
            raise InputError("the run did not reach its final personalisation")
        last = outcome.reports()
        names = dict.fromkeys(name for report in last.values() for name in report)
        clients = tuple(sorted(last))
        return Result(
            trained=TrainedRun(study.recipe, study, self.final.method, self.final.shared, self.personal),
            clients=clients,
            metrics={
                name: np.array([last[client].get(name, np.nan) for client in clients]) for name in names
            },
            summary=outcome.last(),
            rounds=self.rounds,
            engine=self.engine,
            folder=folder,
            note=str(outcome.exhausted or ""),
            _evaluated={**outcome.evaluated, max(self.final.round, 0): last},
        )
