"""A registry of any size with devices, runs, releases and roll-outs, for tests of the pages."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from edge_fl.metrics import Summary
from edge_fl.wire.messages import Capability
from edge_fl_server.registry import Database, releases, reports, rollouts, runs
from edge_fl_server.registry import devices as registered
from edge_fl_server.registry.records import (
    DeviceRecord,
    Rejection,
    ReleaseRecord,
    ReportRecord,
    RequestRecord,
    RoundRecord,
    RunRecord,
)
from edge_fl_server.registry.tables import reports as report_table
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.round_metrics import RoundMetrics

CLASSES = 10
STATUSES = ("ready", "ready", "ready", "ready", "ready", "ready", "ready", "lost", "sleeping", "alert")
ROUNDS = 12
AT = "2026-11-20T10:{:02d}:{:02d}.000+00:00"


def name(number: int) -> str:
    return f"pi-{number:05d}"


def fill(db: Database, devices: int, folder: Path, *, reports_each: int = 3) -> None:
    """Devices of both tiers with their reports, a run of some rounds, three releases, a roll-out that is over."""
    rng = np.random.default_rng(5)
    rows, measured = [], []
    for number in range(devices):
        counts = rng.multinomial(80, rng.dirichlet([0.3] * CLASSES)).tolist()
        tier = "full" if number % 5 == 0 else "head"
        able = Capability(
            tier,
            "Raspberry Pi 4 Model B Rev 1.4",
            "3.11.2",
            "1.20.0",
            21,
            3792,
            20480,
            sum(counts),
            counts,
            "" if tier == "full" else ("logistic", "svm", "mlp")[number % 3],
        )
        status = STATUSES[number % len(STATUSES)]
        rows.append(
            DeviceRecord(
                "main",
                name(number),
                status,
                "fitting" if number % 11 == 3 and status == "ready" else "idle",
                3 if number % 4 else 2,
                "data_changed" if status == "alert" else "",
                f"boot-{number}",
                msgspec.to_builtins(able),
            )
        )
        for release in range(1, reports_each + 1):
            before = float(np.clip(0.7 + 0.05 * release + rng.normal(0, 0.08), 0, 1))
            measured.append(
                msgspec.to_builtins(
                    ReportRecord(
                        "main", name(number), f"rel-{release}", "toy-1", release, "head", sum(counts), {},
                        before, min(before + 0.06, 1.0), release, "svm", 1.4, 52_000, 900, "",
                        AT.format(release, number % 60),
                    )
                )
            )  # fmt: skip
    registered.record(db, rows)
    with db.writing() as connection:
        if measured:
            connection.execute(report_table.insert(), measured)
    registered.quarantine(db, "main", name(7), "3 reports rejected, the last one because of norm")
    registered.score(db, "main", {name(5): 0.2, name(7): 22.8})
    registered.set_revoked(db, "main", {name(6)})
    runs.begin(db, RunRecord("toy-0", "main", "fedavg", "digits", "fleet", 4, str(folder)))
    runs.end(db, "toy-0", "failed", "round 3: 1 of 4 clients responded, at least 2 required")
    runs.begin(db, RunRecord("toy-1", "main", "fedrep", "digits", "fleet", ROUNDS + 8, str(folder)))
    with (folder / "round_metrics.jsonl").open("w") as file:
        for round in range(1, ROUNDS + 1):
            mean = 0.93 - 0.5 * 0.75**round
            summary = {
                "mean": mean,
                "weighted_mean": mean,
                "std": 0.09,
                "bottom_decile": mean - 0.2,
                "clients": 20,
            }
            other = {**summary, "mean": mean - 0.08}
            metrics = {"personal.test_acc.before": summary, "global.test_acc": other}
            file.write(
                round_metrics.encode(
                    RoundMetrics(
                        round=round,
                        selected=tuple(map(name, range(20))),
                        responded=tuple(map(name, range(19))),
                        seconds=3.5,
                        metrics=msgspec.convert(metrics, dict[str, Summary]),
                    )
                ).decode()
            )
            means = {"personal.test_acc.before": mean, "global.test_acc": mean - 0.08}
            runs.record_round(db, RoundRecord("toy-1", round, 20, 19, 3.5, 1_200_000, 1_180_000, means))
    requested = [
        RequestRecord("main", name(n), "t-13", "toy-1", ROUNDS + 1, "train") for n in range(min(20, devices))
    ]
    runs.add_requests(db, [*requested, RequestRecord("main", name(0), "t-4", "toy-1", 4, "train")])
    runs.settle_requests(db, "main", "t-4", "timed_out")
    for number in range(min(9, devices)):
        runs.settle_requests(db, "main", "t-13", "succeeded", device=name(number))
    reports.reject(
        db,
        Rejection("main", name(7), "t-3", "toy-1", 3, "norm", "an update of norm 912, at most 40 expected"),
    )
    for release in (1, 2, 3):
        releases.record(
            db, ReleaseRecord("main", release, "toy-1", 4 * release, "fedrep", 64 * str(release), 51_000)
        )
        number = rollouts.begin(db, "main", release, previous=release - 1, plan={"stages": [0.05, 0.25, 1.0]})
        record = rollouts.get(db, number)
        assert record is not None
        rollouts.advance(db, record, state="completed", stage=2, reason="18 of 18 devices succeeded")
