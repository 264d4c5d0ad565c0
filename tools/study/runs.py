"""Run one federation: train, then fit heads of the head-only clients on the exported extractor; store the result like a cell of `compare`.

A stored cell is run again only if its inputs changed (`edge_fl_lab.compare.cell_runs`).
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from edge_fl import heads, metrics
from edge_fl.data.samples import ClientData
from edge_fl.errors import EdgeFLError
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import to_arrays
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.methods.dualfed import DualFed
from edge_fl.methods.local import Local
from edge_fl_lab.compare import cell_runs
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell
from edge_fl_server.orchestrate.execution import simulate
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines.processes import threads
from edge_fl_server.training.rounds import FinalResult, RunHooks
from edge_fl_server.training.studies import Study

HEAD_ONLY = "head_only.test_acc"
"""Test accuracy of a client that never trained, with a head fitted on the exported extractor."""

PIXELS = "head_only.test_acc.pixels"
"""The same with the pixels as features: what such a client reaches without any extractor; measured along with Local."""

PERSONAL_HEAD = "dualfed.test_acc.personal_head"
"""Test accuracy of DualFed's personal head alone; that of its global head alone is `edge_fl.metrics.GLOBAL_TEST`."""


def run(cell: Cell, folder: Path, commit: str = "") -> CellResult:
    """Return the stored result of a cell, or run it. A failed run is a result too. Raises InputError for a cell that cannot run."""
    study = cell_runs.prepare(cell)
    today = cell_runs.inputs_of(study)
    stored = cell_runs.read(cell, folder, today)
    if stored and not cell_runs.changed_inputs(stored.inputs, today):
        return stored
    start_s = time.monotonic()
    hooks = _Measurements(study)
    result = CellResult(cell.key, cell.label, cell.recipe, commit, today, "sequential")
    try:
        with threads(1), threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            outcome = simulate(study, hooks)
        found = outcome.reports()
        reports = {
            id: {**found.get(id, {}), **hooks.reports.get(id, {})} for id in {**found, **hooks.reports}
        }
        result = msgspec.structs.replace(result, last=outcome.last(), clients=reports)
    except EdgeFLError as error:
        result = msgspec.structs.replace(result, failure=str(error))
    result = msgspec.structs.replace(result, seconds=time.monotonic() - start_s)
    cell_runs.write(result, folder)
    return result


class _Measurements(RunHooks):
    """After training: heads of the clients that never train, and DualFed's personal heads alone."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.reports: dict[str, dict[str, float]] = {}

    def after_final(self, result: FinalResult, fleet: Clients) -> None:
        batch_size = self._study.recipe.method.batch_size
        for id, data in self._study.unseen_data().items():
            self.reports[id] = head_only(result, data, batch_size)
        if isinstance(result.method, DualFed):
            alone = replace(result.method, ensemble="personal")
            data = self._study.data()
            for id, own in fleet.personal_state():
                down = steps.broadcast(alone, result.shared, id)
                predict = partial(steps.predict, alone, down, own)
                y = in_batches(predict, torch.from_numpy(data[id].test.x)).argmax(1).numpy()
                self.reports[id] = {PERSONAL_HEAD: metrics.accuracy(y, data[id].test.y)}


def head_only(result: FinalResult, data: ClientData, batch_size: int) -> dict[str, float]:
    """Accuracy of a head-only client with the method's extractor if it exports one; for Local with pixels."""
    method, shared = result.method, result.shared
    release: dict[str, Any] = {"classes": method.net.classes, "unit_norm": method.unit_norm}
    name = HEAD_ONLY
    features: Callable[[Tensor], Tensor] = partial(steps.exported_features, method, shared)
    if isinstance(method, Local):
        name, features = PIXELS, partial(torch.flatten, start_dim=1)
    elif "extractor" not in method.exports:
        return {}
    else:
        extras = to_arrays({key: shared[key] for key in method.head_tier.extras if shared.get(key)})
        release |= {"plan": head_plan(method, batch_size, collect=False), "extras": extras}
    train, test = (in_batches(features, torch.from_numpy(part.x)).numpy() for part in (data.train, data.test))
    head = heads.fit("logistic", train, data.train.y, **release)
    return {name: metrics.accuracy(head.predict(test), data.test.y)}
