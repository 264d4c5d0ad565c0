"""A registry of any size with devices, runs, releases and roll-outs, for tests of the pages. Its figures agree with each other."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Table, update

from edge_fl import metrics
from edge_fl.metrics import Summary
from edge_fl.wire.messages import Capability
from edge_fl_server.registry import Database, history, registered_reports, registered_tags, tables
from edge_fl_server.registry.tables import (
    DeviceRecord,
    HistoryRecord,
    RejectionRecord,
    ReleaseRecord,
    ReportRecord,
    RequestRecord,
    RolloutRecord,
    RoundRecord,
    RunRecord,
)
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.round_metrics import RoundMetrics

CLASSES = 10
AGENTS = ("0.1.0", "0.2.0", "0.10.0")
"""Versions, by a device's number."""
STATUSES = ("ready", "ready", "ready", "lost", "ready", "ready", "ready", "ready", "sleeping", "alert")
"""By the last digit of a device's number."""
SEEN_MINUTES = {"ready": 0.1, "lost": 130.0, "sleeping": 38.0, "alert": 1.2, "stopped": 2900.0}
"""Status -> age of the last message."""
ROUNDS, ROUND_MINUTES = 12, 24.0
COHORT = 20
REVOKED, QUARANTINED, WORST = 6, 7, 4
"""Numbers of single devices; QUARANTINED is a full device, WORST a head-only one with few samples."""


def name(number: int) -> str:
    return f"pi-{number:05d}"


def is_full(number: int) -> bool:
    return number % 5 == 2


def full(devices: int) -> list[int]:
    """The full devices whose reports count, at most a cohort."""
    return [n for n in range(devices) if is_full(n) and n != QUARANTINED][:COHORT]


def accuracy(round: int) -> float:
    """Mean personal accuracy of the full devices; the shared model has 8 points less."""
    return 0.93 - 0.5 * 0.75**round


def at(minutes_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(minutes=minutes_ago)).isoformat(timespec="milliseconds")


def after_round(round: int, later: float = 0.0) -> str:
    """The end of a round of the current run, or `later` minutes after it."""
    return at((ROUNDS - round) * ROUND_MINUTES + 11 - later)


def add(db: Database, table: Table, *records: Any) -> None:
    """Store records as they are, with their times."""
    rows = [msgspec.to_builtins(record) for record in records]
    if table is tables.rollouts:
        rows = [{key: value for key, value in row.items() if key != "number"} for row in rows]
    if rows:
        with db.writing() as connection:
            connection.execute(table.insert(), rows)


def fill(db: Database, devices: int, folder: Path) -> None:
    """Devices of both tiers with their reports, a failed run and one of some rounds, three releases and their roll-outs."""
    rng = np.random.default_rng(12)
    found, measured = [], []
    for number in range(devices):
        record, sent = _device(number, rng)
        found.append(record)
        measured += sent
    add(db, tables.devices, *found)
    add(db, tables.reports, *measured)
    registered_tags.change(db, "main", [one.device for one in found[::2]], {"site": "berlin", "line": "2"})
    _runs(db, full(devices), folder)
    heads = [one for one in found if one.capability["tier"] == "head"]
    for release in (1, 2, 3):
        origin = ("toy-1", 4 * release, "fedrep", 64 * str(release), 51_000)
        add(
            db,
            tables.releases,
            ReleaseRecord("main", release, *origin, published_at=after_round(4 * release, 0.2)),
        )
        present = [one for one in heads if not (release == 3 and one.revoked)]
        running = [one for one in present if release < 3 or one.release == 3]
        add(
            db,
            tables.rollouts,
            RolloutRecord(
                0, "main", release, release - 1, {"stages": [0.05, 0.25, 1.0], "success": 0.8},
                state="completed", stage=2, reason=f"{len(running)} of {len(present)} devices succeeded",
                created_at=after_round(4 * release, 0.3), changed_at=after_round(4 * release, 7.5),
            ),
        )  # fmt: skip


def _device(number: int, rng: np.random.Generator) -> tuple[DeviceRecord, list[ReportRecord]]:
    """A device, and for a head-only one its reports on the releases: those in alert could not install the last one."""
    status = "stopped" if number == REVOKED else STATUSES[number % len(STATUSES)]
    samples = 40 if number == WORST else int(rng.integers(64, 132))
    spread = [0.08] * CLASSES if number == WORST else [0.5] * CLASSES
    counts = rng.multinomial(samples, rng.dirichlet(spread)).tolist()
    tier = "full" if is_full(number) else "head"
    head = "" if tier == "full" else ("logistic", "svm", "mlp")[number % 3]
    able = Capability(
        tier, "Raspberry Pi 4 Model B Rev 1.4", "3.11.2", "1.20.0", 21, 3792, 20480, samples, counts, head,
        agent=AGENTS[number % len(AGENTS)],
    )  # fmt: skip
    has_newest = status != "alert" and number != REVOKED
    busy = "training" if tier == "full" else "fitting"
    blocked = {
        REVOKED: {"revoked": True, "blocked_at": at(2880)},
        QUARANTINED: {
            "quarantine": "3 reports rejected, the last one because of norm",
            "blocked_at": after_round(3),
            "rejections": 3,
            "outlier_score": 22.8,
        },
        5: {"outlier_score": 0.2},
    }
    record = DeviceRecord(
        "main",
        name(number),
        status,
        busy if number % 11 == 3 and status == "ready" else "idle",
        0 if tier == "full" else 3 if has_newest else 2,
        "enospc" if status == "alert" else "",
        f"boot-{number}",
        msgspec.to_builtins(able),
        seen_at=at(SEEN_MINUTES[status] + number % 7),
        first_seen_at=at(43_000 - 3 * (number % 500)),
        **blocked.get(number, {}),
    )
    if tier == "full":
        return record, []
    images = samples // 2
    skill = 0.52 if number == WORST else float(np.clip(rng.normal(0.83, 0.05), 0, 0.9))
    sent, before = [], None
    for release in (1, 2) if number == REVOKED else (1, 2, 3):
        failed = release == 3 and not has_newest
        gained = 0.035 * (release - 1) + rng.normal(0, 0.015)
        after = None if failed else min(round(images * (skill + gained)), images) / images
        values = {
            metrics.PERSONAL_BEFORE: before,
            metrics.PERSONAL_AFTER: after,
            metrics.TEST_SAMPLES: images,
        }
        sent.append(
            ReportRecord(
                "main", name(number), f"rel-{release}", "toy-1", 4 * release, "head", samples,
                {} if failed else {key: value for key, value in values.items() if value is not None},
                None if failed else before, after, release, head, 1.1 + number % 8 / 10, 52_000, 900,
                "enospc" if failed else "", after_round(4 * release, 0.5 + number % 60 / 10),
            )
        )  # fmt: skip
        before = after
    return record, sent


def _runs(db: Database, cohort: list[int], folder: Path) -> None:
    """A run that failed, and one whose round 13 is under way; the quarantined device's reports of rounds 1 to 3 were rejected."""
    failure = "round 3: 1 of 4 clients responded, at least 2 required"
    add(
        db,
        tables.runs,
        RunRecord(
            "toy-0", "main", "fedavg", "digits", "fleet", 4, str(folder), "failed", failure,
            created_at=at(4400), ended_at=at(4380),
        ),
        RunRecord(
            "toy-1", "main", "fedrep", "digits", "fleet", ROUNDS + 8, str(folder), created_at=after_round(0)
        ),
    )  # fmt: skip
    n = len(cohort)
    with (folder / round_metrics.FILE).open("w") as file:
        for number in range(1, ROUNDS + 1):
            responded = cohort[1:] if number < 5 else cohort
            summary = {}
            for metric, mean in (
                (metrics.PERSONAL_BEFORE, accuracy(number)),
                (metrics.GLOBAL_TEST, accuracy(number) - 0.08),
            ):
                summary[metric] = Summary(mean, mean, 0.09, mean - 0.12, n)
            line = RoundMetrics(
                round=number,
                selected=tuple(map(name, cohort)),
                responded=tuple(map(name, responded)),
                seconds=3.5,
                metrics=summary,
            )
            file.write(round_metrics.encode(line).decode())
            updates = (
                ReportRecord(
                    "main", name(one), f"t-{number}", "toy-1", number, "update", 90, seconds=2.0, bytes_down=60_000,
                    bytes_up=59_000, received_at=after_round(number),
                )
                for one in responded
            )  # fmt: skip
            add(db, tables.reports, *updates)
            means = {metric: one.mean for metric, one in summary.items()}
            add(
                db,
                tables.rounds,
                RoundRecord(
                    "toy-1", number, n, len(responded), 3.1 + number % 5 / 5, means, dict.fromkeys(means, n), after_round(number),
                ),
            )  # fmt: skip
    if cohort:
        late = ("timed_out", "", after_round(4, -3), after_round(4))
        add(
            db,
            tables.requests,
            RequestRecord("main", name(cohort[0]), "t-4", "toy-1", 4, "train", *late),
        )
    for place, number in enumerate(cohort):
        ended = ("succeeded", "", at(1), at(0.5)) if place < 9 else ("queued", "", at(1))
        add(
            db,
            tables.requests,
            RequestRecord("main", name(number), "t-13", "toy-1", ROUNDS + 1, "train", *ended),
        )
    for number in (1, 2, 3):
        detail = f"an update of norm {900 + 4 * number}, at most 40 expected"
        registered_reports.reject(
            db, RejectionRecord("main", name(QUARANTINED), f"t-{number}", "toy-1", number, "norm", detail)
        )
        with db.writing() as connection:
            mine = tables.rejections.c.id == f"t-{number}"
            connection.execute(update(tables.rejections).where(mine).values(received_at=after_round(number)))


def past(db: Database, devices: int) -> None:
    """The fleet's history of a day, with an hour without a server: devices joined, and release 2 was better than release 1."""
    now_s = int(datetime.now(UTC).timestamp())
    for minute in (*range(1440, 60, -10), *range(60, 0, -1)):
        if 600 <= minute < 660:
            continue
        known = devices - minute * devices // 2000
        release = 1 if minute > 900 else 2 if minute > 300 else 3
        served, of_fleets = 0.78 + 0.04 * release + 0.01 * np.sin(minute), 0.74 + 0.02 * release
        row = HistoryRecord(
            "main", now_s - 60 * minute, known, known - known // 10 - minute % 3, release, float(served),
            7 * known // 10, of_fleets, known // 2, accuracy(12 - minute // 120), min(20, devices // 5),
        )  # fmt: skip
        history.record(db, row)


def evaluate(db: Database, devices: int) -> None:
    """Full devices' reports of the newest round: their personal models and the shared one on the same images."""
    cohort = full(devices)
    apart = np.linspace(-0.06, 0.06, len(cohort))
    gains = 0.08 + np.roll(apart, len(cohort) // 3) / 2
    for number, own, gain in zip(cohort, accuracy(ROUNDS) + apart, gains, strict=True):
        values = {metrics.PERSONAL_BEFORE: float(own), metrics.GLOBAL_TEST: float(own - gain)}
        sent = ReportRecord("main", name(number), "e-12", "toy-1", ROUNDS, "evaluation", 80, values)
        add(db, tables.reports, msgspec.structs.replace(sent, received_at=after_round(ROUNDS)))


LONG = "a-camera-at-the-north-gate"
"""Names of up to 32 characters begin with it, and come first in every order."""
MANY_CLASSES = 100


def crowd(db: Database, folder: Path) -> None:
    """Add names as long as they may be, many classes, tags, reports and rounds; the first device has all of them."""
    rng = np.random.default_rng(35)
    names = [f"{LONG}-{number:05d}" for number in range(12)]
    able = [
        Capability(
            "head", "Raspberry Pi Compute Module 4 Rev 1.1", "3.13.5", "1.20.0", 21, 3792, 20480, 4000,
            rng.poisson(40, MANY_CLASSES).tolist(), "auto", agent="0.10.0rc1.dev20261128+g0123456789abcdef", drift=1.2,
        )
        for _ in names
    ]  # fmt: skip
    add(
        db,
        tables.devices,
        *(
            DeviceRecord(
                "main", name, "alert", "fitting", 3, "enospc", "boot-1", msgspec.to_builtins(one),
                seen_at=at(1), first_seen_at=at(9000), quarantine="3 reports rejected, the last one because of norm",
                blocked_at=at(30), rejections=3, outlier_score=22.8,
            )
            for name, one in zip(names, able, strict=True)
        ),
    )  # fmt: skip
    tagged = {"site": "berlin-adlershof-building-26-north", "line": "2", "owner-of-the-device": "x" * 64}
    registered_tags.change(db, "main", names, tagged)
    run = f"{LONG}-run-1"
    add(
        db,
        tables.runs,
        RunRecord("toy-2", "main", "fedrep", "digits", "fleet", 200, str(folder / "none"), created_at=at(200)),
        RunRecord(
            run, "main", "fedavg+finetuning", "a-data-set-with-a-long-name", "fleet", 4, str(folder / "none"), "failed",
            "round 3: 1 of 4 clients responded, at least 2 required", created_at=at(300), ended_at=at(290),
        ),
    )  # fmt: skip
    means = {
        metrics.PERSONAL_BEFORE: 0.9,
        metrics.GLOBAL_TEST: 0.8,
        metrics.LOCAL_ONLY: 0.7,
        metrics.PERSONAL_LOCAL: 0.85,
    }
    add(
        db,
        tables.rounds,
        *(
            RoundRecord(
                "toy-2", number, 9, 9, 3.0, {name: mean - 0.3 * 0.98**number for name, mean in means.items()},
                dict.fromkeys(means, 9 - number % 7), at(100 - number),
            )
            for number in range(1, 61)
        ),
    )  # fmt: skip
    kinds = ("logistic", "svm", "mlp", "prototypes")
    measured = {
        metrics.TEST_SAMPLES: 60,
        metrics.FLEET: 0.6,
        metrics.EPSILON: 1.25,
        metrics.OWN_WEIGHT: 0.4,
    }
    measured |= {metrics.at_labels(n, kind): 0.99 - 0.5 / n for n in (1, 2, 5, 10) for kind in kinds}
    add(
        db,
        tables.reports,
        *(
            ReportRecord(
                "main", names[0], f"long-{number}", run, number, "head", 4000,
                measured, 0.7, 0.8 + number % 9 / 50, number, "logistic", 1.1, 52_000, 900,
                received_at=at(60 - number),
            )
            for number in range(1, 31)
        ),
    )  # fmt: skip
