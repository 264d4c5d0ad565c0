"""The figures of a report: accuracy by round, bytes and labels, and the clients. A figure with one point or one client is left out."""

from collections.abc import Iterator, Mapping

import numpy as np

from edge_fl import metrics
from edge_fl_lab.report import plots
from edge_fl_lab.report.facts import Points, RunReport
from edge_fl_lab.report.plots import Curve, Drawn
from edge_fl_server.runs.summaries import LEAST_SHARE

SHOWN = {
    metrics.PERSONAL_BEFORE: "personal models",
    metrics.GLOBAL_TEST: "shared model",
    metrics.LOCAL_ONLY: "local training only",
    metrics.UNSEEN_TEST: "shared model, unseen clients",
}
"""Curves by round, and their names; the other metrics are in the table of values."""


def of_report(report: RunReport) -> Iterator[Drawn]:
    """The figures of a report."""
    seed = f"seed {report.settings['seed']}"
    shown = {SHOWN[name]: points for name, points in report.curves.items() if name in SHOWN}
    finals = [group.mean.value for group in report.groups if group.metric == metrics.PERSONAL_AFTER]
    after = {SHOWN[metrics.PERSONAL_BEFORE]: float(finals[0] or 0.0)} if len(finals) == 1 else {}
    if curves := _curves(shown, after):
        note = f"Mean over {_clients(curves)}; band: ±1 std over clients; {seed}."
        yield Drawn(
            "accuracy",
            plots.accuracy(curves, "mean test accuracy", note),
            "Test accuracy by round",
            f"Mean test accuracy over clients by round, on {report.dataset}.",
        )
        places: dict[float, float] = {
            round: bytes / plots.MEGABYTE for round, bytes in report.bytes_by_round.items()
        }
        against = {
            name: Curve([places[round] for round in curve.rounds], curve.mean, curve.std, None, curve.clients)
            for name, curve in curves.items()
            if all(places.get(round) for round in curve.rounds)
        }
        if against:
            yield Drawn(
                "accuracy-by-megabytes",
                plots.accuracy(against, "mean test accuracy", note, step="MB to and from a client so far"),
                "Test accuracy by traffic",
                "Mean test accuracy against the tensors sent to and from a client until then (1 MB = 10⁶ bytes).",
            )
    rows = {
        group.name: [float(one.accuracy.value or 0.0) for one in group.devices.values()]
        for group in report.groups
    }
    if any(len(values) > 1 for values in rows.values()):
        yield Drawn(
            "clients",
            plots.clients(rows, "test accuracy", f"{plots.BOX}; {seed}."),
            "Test accuracy of each client",
            "Each client's test accuracy on its own test samples.",
        )
    if labels := _curves(report.labels, {}):
        note = f"Mean over {_clients(labels)} whose head is auto; band: ±1 std over them."
        yield Drawn(
            "labels",
            plots.accuracy(labels, "held-out accuracy", note, step="labels per class"),
            "Held-out accuracy by labels per class",
            "Held-out accuracy of each kind of head against the number of labels per class.",
        )


def _curves(curves: Mapping[str, Points], after: Mapping[str, float]) -> dict[str, Curve]:
    """The curves of more than one point."""
    drawn = {}
    for name, points in curves.items():
        measured = [
            (at, mean.value, std.value or 0.0, n.value or 0)
            for at, mean, std, n in points
            if mean.value is not None
        ]
        if len(measured) > 1:
            places, means, stds, clients = zip(*measured, strict=True)
            drawn[name] = Curve(places, np.array(means), np.array(stds), after.get(name), clients)
    return drawn


def _clients(curves: Mapping[str, Curve]) -> str:
    """How many clients the points of the curves are over."""
    found = [n for curve in curves.values() for n in curve.clients]
    if min(found) == max(found):
        return f"n = {found[0]} clients"
    few = any(curve.faded.any() for curve in curves.values())
    return f"n = {min(found)} to {max(found)} clients" + few * f", faded below {LEAST_SHARE * max(found):g}"
