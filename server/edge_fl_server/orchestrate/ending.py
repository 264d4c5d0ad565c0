"""What `server run` says at its end: the result with its n, its gain and its release, who was not measured, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from contextlib import closing
from math import isfinite, isnan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from edge_fl import metrics
from edge_fl.console.units import counted, difference, percent
from edge_fl.errors import shortened
from edge_fl.files.paths import text
from edge_fl.heads.wording import NOT_MEASURED, MeasuredAccuracy
from edge_fl_server.recipes.recipe import BrokerConfig
from edge_fl_server.registry import Database, rollouts
from edge_fl_server.registry.database import location
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.summaries import paired

if TYPE_CHECKING:
    from edge_fl_server.orchestrate.serving import FleetAccess

HEADINGS = ("result", "not measured", "report", "next", "to serve the fleet until the next run")
"""The words before the colon of each line."""
MAX_NAMED = 8
BASELINES = {
    metrics.LOCAL_ONLY: "training on its own data alone",
    metrics.FLEET: "the fleet's head",
    metrics.GLOBAL_TEST: "the shared model",
}
"""What a personal model is compared with, the first that was measured on the same devices -> its name."""
Measured = Mapping[str, Mapping[str, float]]
"""Device -> metric -> value."""


def lines(results: Results, access: FleetAccess) -> list[str]:
    """The lines of a finished run with devices."""
    found = [line.clients for line in round_metrics.lines(results.path / round_metrics.FILE) if line.final]
    measured = {device: dict(values) for device, values in (found[-1] if found else {}).items()}
    missing = unmeasured([row["device"] for row in results.devices()], measured)
    report = results.path / "report.html"
    said = (
        f"{accuracy(measured)}; {_release(results, access)}",
        missing,
        text(report) if report.exists() else "",
        command("fleet list", results, access),
        command("server up", results, access),
    )
    return [f"{heading}: {words}" for heading, words in zip(HEADINGS, said, strict=True) if words]


def accuracy(measured: Measured) -> str:
    """The mean accuracy of the personal models and their gain, each with its n."""
    personal = _of(measured, metrics.PERSONAL_AFTER) or _of(measured, metrics.PERSONAL_BEFORE)
    if not personal:
        return "no device measured the accuracy of a personal model"
    said = f"personal models {percent(fmean(personal.values()))}, mean accuracy of {counted(len(personal), 'device')}"
    for baseline, name in BASELINES.items():
        if gain := paired(_of(measured, baseline), personal):
            mean, low, high = difference(gain.mean, gain.low, gain.high)
            interval = "" if isnan(gain.low) else f"95 % interval {low} to {high}, "
            return f"{said}; {mean} points over {name} ({interval}n = {gain.n})"
    return f"{said}; gain not measured: no device measured another model on the same samples"


def unmeasured(devices: Iterable[str], measured: Measured) -> str:
    """The devices without an accuracy, with the reason; "" without any."""
    reasons: dict[str, list[str]] = {}
    for device in devices:
        found = MeasuredAccuracy.of_report(measured.get(device, {}))
        before = measured.get(device, {}).get(metrics.PERSONAL_BEFORE)
        if found.accuracy is None and (found.n or before is None):
            known = metrics.TEST_SAMPLES in measured.get(device, {})
            why = found.words.removeprefix(NOT_MEASURED).strip(" ()") if known else "no report"
            reasons.setdefault(why or "no report", []).append(device)
    return "; ".join(f"{shortened(names, MAX_NAMED)} ({why})" for why, names in reasons.items())


def command(words: str, results: Results, access: FleetAccess, **options: str) -> str:
    """A command on this run's fleet, with these options and those that are not at their defaults."""
    given = msgspec.to_builtins(results.recipe().broker).items()
    values: dict[str, object] = {**options}
    values |= {name: value for name, value in given if value != getattr(BrokerConfig(), name)}
    if access.home != Path("runs/releases"):
        values["home"] = text(access.home)
    if access.registry != location("", access.home):
        values["database"] = access.registry
    return shlex.join(
        [
            "edge-fl",
            *words.split(),
            *(part for name, value in values.items() for part in (f"--{name}", str(value))),
        ]
    )


def _of(measured: Measured, metric: str) -> dict[str, float]:
    """The finite values of a metric; an accuracy on too few scenes is none."""
    found = {device: values[metric] for device, values in measured.items() if metric in values}
    least = {
        device: MeasuredAccuracy.of_report({**measured[device], metrics.PERSONAL_AFTER: 0.0})
        for device in found
    }
    return {
        device: value
        for device, value in found.items()
        if isfinite(value) and least[device].accuracy is not None
    }


def _release(results: Results, access: FleetAccess) -> str:
    """The newest release of a run, and whether the fleet serves it."""
    with closing(Database.open(access.registry)) as db:
        number = max(
            (one.release for one in rollouts.releases_of(db, access.fleet) if one.run == results.id),
            default=0,
        )
        if not number:
            return "no release"
        if rollouts.served_release(db, access.fleet) == number:
            return f"release {number} is in service"
        states = [one.state for one in rollouts.listed(db, access.fleet) if one.release == number]
        return f"release {number} is not in service" + (
            f": its roll-out is {states[0].replace('_', ' ')}" if states else ""
        )
