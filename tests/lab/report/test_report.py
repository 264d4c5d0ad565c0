"""The report of a run: its figures equal those of the JSONL, it has no external reference, and it lists what devices sent."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.methods.contract.tiers import of_method
from edge_fl.metrics import Summary
from edge_fl_lab import catalogue
from edge_fl_lab.report import facts, page
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics
from edge_fl_server.training.records import RoundVerdict
from tests.browsing import DEADLINE_S
from tests.lab.report.test_comparison_page import opens

NAMES = (metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST, metrics.PERSONAL_VALIDATION_BEFORE)
CLIENTS = [f"c{number:03d}" for number in range(12)]


def round_of(clients: dict[str, dict[str, float]], **fields: Any) -> RoundMetrics:
    summaries = metrics.summarise_reports(list(clients.values()))
    return RoundMetrics(metrics=summaries, clients=clients, **fields)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A run of five rounds and a final personalisation, with values by client."""
    rng = np.random.default_rng(3)
    with Results.create(tmp_path, Recipe(name="toy")) as results:
        for round in range(1, 6):
            found = {
                client: {name: float(rng.uniform(0.4, 0.8)) for name in NAMES}
                | {metrics.TEST_SAMPLES: float(20 + n)}
                for n, client in enumerate(CLIENTS)
            }
            sizes = {"seconds": 0.5 * round, "bytes_down": 1000 * round, "bytes_up": 900 * round}
            results.append_round(
                round_of(found, round=round, selected=tuple(CLIENTS), responded=tuple(CLIENTS[1:]), **sizes)
            )
        # As a run writes it: the newest value of each metric and client.
        final = {
            client: {**found[client], metrics.PERSONAL_AFTER: float(rng.uniform(0.6, 0.9))}
            for client in CLIENTS
        }
        for client in CLIENTS[:2]:  # the heads of these are `auto`
            final[client] |= {metrics.at_labels(k, "mlp"): float(rng.uniform(0.2, 0.9)) for k in (5, 1, 20)}
        results.append_round(round_of(final, round=5, final=True))
    return results


@pytest.fixture
def report(results: Results) -> facts.RunReport:
    return page.report(results)


def lines(results: Results) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (results.path / "round_metrics.jsonl").read_text().splitlines()]


def recomputed(found: list[dict[str, Any]], figure: dict[str, str]) -> float:
    """The value of a figure, computed from its lines without the code under test."""
    chosen = [found[int(number) - 1] for number in figure["line"].split(",")]
    if figure["field"] in ("selected", "responded"):
        return sum(len(line[figure["field"]]) for line in chosen)
    if figure["field"] == "round":
        return len(chosen)
    if figure["field"].startswith("paired."):
        (line,) = chosen
        before, after = (
            {c: r[figure[key]] for c, r in line["clients"].items() if figure[key] in r}
            for key in ("against", "metric")
        )
        both = sorted(before.keys() & after.keys())
        pairs = np.array([[before[client], after[client]] for client in both])
        return {
            "paired.n": len(both),
            "paired.baseline": pairs[:, 0].mean(),
            "paired.accuracy": pairs[:, 1].mean(),
            "paired.difference": (pairs[:, 1] - pairs[:, 0]).mean(),
        }[figure["field"]]
    if "metric" not in figure:
        return sum(line[figure["field"]] for line in chosen)
    (line,) = chosen
    reports = {client: report for client, report in line["clients"].items() if figure["metric"] in report}
    if "client" in figure:
        return reports[figure["client"]][figure["metric"]]
    values = np.array([report[figure["metric"]] for report in reports.values()])
    weights = np.array([report.get(metrics.TEST_SAMPLES, 0.0) for report in reports.values()])
    return {
        "mean": values.mean(),
        "weighted_mean": np.average(values, weights=weights) if weights.sum() else values.mean(),
        "std": values.std(),
        "bottom_decile": np.sort(values)[:2].mean(),
        "clients": len(values),
    }[figure["field"]]


def test_every_figure_equals_the_value_on_its_lines(results: Results) -> None:
    drawn = page.html(page.report(results))
    marks = [
        dict(re.findall(r'data-(\w+)="([^"]*)"', tag))
        for tag in re.findall(r"<(?:td|dd)[^>]*data-line[^>]*>", drawn)
    ]
    found = lines(results)
    assert len(marks) > 50 and {"mean", "bottom_decile", "bytes_up", "value", "paired.difference"} <= {
        mark["field"] for mark in marks
    }
    for mark in marks:
        assert float(mark["value"]) == pytest.approx(recomputed(found, mark), rel=1e-12), mark


def test_the_final_personalisation_is_last_and_no_round_is_selected_by_its_test_accuracy(
    results: Results, report: facts.RunReport
) -> None:
    rows = {(row.metric, row.which): row for row in report.accuracy}
    assert rows[metrics.PERSONAL_AFTER, "last"].figures[0].lines == "6"
    best = rows[metrics.PERSONAL_BEFORE, metrics.BEST_BY_VALIDATION]
    validation = [np.mean([r[NAMES[2]] for r in line["clients"].values()]) for line in lines(results)[:5]]
    assert best.round == 1 + int(np.argmax(validation))
    (group,) = report.groups
    lowest = min(group.devices, key=lambda name: group.devices[name].accuracy.value or 0.0)
    assert group.worst[0] == lowest and len(group.worst) == facts.WORST
    assert group.devices[lowest].test_samples.value == 20 + CLIENTS.index(lowest)


def test_accuracy_by_labels_is_a_curve_and_not_a_row_of_the_table(report: facts.RunReport) -> None:
    assert [labels for labels, *_ in report.labels["mlp"]] == [1, 5, 20]
    assert not any("labels_" in row.metric for row in report.accuracy)
    drawn = page.html(report)
    assert "by labels per class" in drawn and f'data-metric="{metrics.at_labels(5, "mlp")}"' in drawn


def test_the_report_lists_the_messages_of_the_egress_manifest() -> None:
    manifests = of_method(catalogue.sample("fedkd"))
    found = facts.messages("fleet", manifests)
    assert found["update report of full devices"] == "tensors of: change, change.export_norm"
    assert "metrics" in found["rpt"] and metrics.PERSONAL_AFTER in found["numbers in a report"]
    assert facts.messages("simulated", manifests) == {}


def test_epsilon_is_the_largest_over_clients_and_not_an_accuracy(tmp_path: Path) -> None:
    with Results.create(tmp_path, Recipe(name="toy")) as results:
        spent = {"c0": 3.0, "c1": 10.62}
        found = {name: {metrics.EPSILON: value, metrics.PERSONAL_AFTER: 0.5} for name, value in spent.items()}
        results.append_round(round_of(found, round=1, final=True))
    report = page.report(results)
    assert report.totals["largest_epsilon"].value == 10.62 and "largest epsilon: 10.6" in page.markdown(
        report
    )
    assert {row.metric for row in report.accuracy} == {metrics.PERSONAL_AFTER}


def test_the_report_states_compression_and_noise() -> None:
    method = replace(
        catalogue.sample("fedper"),
        compression=CompressionConfig("topk"),
        privacy=PrivacyConfig(2.0, 0.5, budget=8.0),
    )
    found = facts.messages("fleet", of_method(method))
    assert found["encoding of full devices"] == (
        "compression topk of 0.1 of the values; clipped to 0.5, noise multiplier 2, budget per device epsilon 8 at delta 1e-05"
    )


def test_a_page_has_no_external_reference(report: facts.RunReport) -> None:
    drawn = page.html(report)
    assert not re.search(r"src=|href=(?!\"#)|url\((?!#)|@import|https?:|//[a-z]", drawn)


def test_text_from_a_run_is_escaped(report: facts.RunReport) -> None:
    drawn = page.html(msgspec.structs.replace(report, reason="<script>alert(1)</script>"))
    assert "<script" not in drawn and "&lt;script&gt;" in drawn


def test_markdown_and_json_have_the_same_figures(results: Results, report: facts.RunReport) -> None:
    after = next(row for row in report.accuracy if row.metric == metrics.PERSONAL_AFTER)
    assert f"| {100 * (after.figures[0].value or 0):.1f} % |" in page.markdown(report)
    decoded = json.loads(page.json(report))
    assert decoded["totals"]["tensors_up"] == {
        "value": 13500, "lines": "1,2,3,4,5", "field": "bytes_up", "metric": "", "client": "", "group": "", "against": "",
    }  # fmt: skip
    assert page.write(results).read_text() == page.html(report)


def test_a_run_without_measurements_has_a_report(tmp_path: Path) -> None:
    with Results.create(tmp_path, Recipe(name="toy")) as results:
        results.finish("failed", "round 1: no client responded")
    drawn = page.html(page.report(results))
    assert "Nothing was measured" in drawn and "no client responded" in drawn


def test_a_summary_without_values_by_client_is_read_unchanged(tmp_path: Path) -> None:
    summary = Summary(0.5, 0.6, 0.1, float("nan"), 3)
    with Results.create(tmp_path, Recipe(name="toy")) as results:
        results.append_round(
            RoundMetrics(round=1, metrics={metrics.GLOBAL_TEST: summary}, rejected={"norm": 1})
        )
    (row,) = page.report(results).accuracy
    assert [figure.value for figure in row.figures] == [0.5, 0.6, 0.1, None, 3]


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_it_opens_with_the_network_blocked(results: Results, browser: Any, tmp_path: Path) -> None:
    path, requested = page.write(results), []
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})
    tab = context.new_page()
    tab.on("request", lambda request: requested.append(request.url))
    tab.on("console", lambda message: requested.append(message.text))
    tab.goto(path.as_uri(), timeout=DEADLINE_S * 1000)
    shown = tab.eval_on_selector_all(
        "#accuracy [data-line]", "all => all.map(e => ({...e.dataset, shown: e.textContent}))"
    )
    found = lines(results)
    for figure in shown:
        value = recomputed(found, figure)
        assert figure["shown"] == (f"{value:.0f}" if figure["field"] == "clients" else f"{100 * value:.1f} %")
    tab.screenshot(path=tmp_path / "report.png", full_page=True)
    context.close()
    assert requested == [path.as_uri()] and len(shown) >= 30


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_it_fits_the_window(results: Results, browser: Any, width: int, scheme: str, tmp_path: Path) -> None:
    opens(page.write(results), browser, width, scheme, tmp_path)


def test_a_round_that_made_devices_worse_is_named_with_who_did_it(results: Results) -> None:
    assert "worse:" not in page.markdown(facts.of_run(results, [], []))
    verdict = RoundVerdict("repaired", -0.52, 0.1, 20, 135, 71, 2, ("pi-07", "pi-08"), {"pi-07": 3.1})
    with Results.resume(results.path, after=5) as resumed:
        resumed.append_round(round_of({}, round=6, verdict=verdict))
        resumed.append_round(round_of({}, round=7, verdict=RoundVerdict("accepted", 0.1, 0.1, 2)))
    (worse,) = facts.of_run(results, [], []).worse
    assert (worse.round, worse.outcome, worse.named) == (6, "repaired", "pi-07")
    for text in (page.markdown(facts.of_run(results, [], [])), page.html(facts.of_run(results, [], []))):
        assert "accuracy -52 points (71 samples lost, 2 gained of 135 on 20 devices; -10 would count)" in text


def test_the_traffic_of_devices_is_that_of_their_table(results: Results) -> None:
    assert {"tensors_down", "tensors_up"} <= page.report(results).totals.keys()
    rows = [
        {
            "device": f"pi-{n}",
            "tier": "head",
            "samples": 9,
            "bytes_down": 7_000_000 + n,
            "bytes_up": 900,
            "statistics_bytes": 9,
        }
        for n in range(3)
    ]
    results.write_devices(rows)
    found = page.report(results)
    assert {name: one.value for name, one in found.totals.items() if "traffic" in name} == {
        "traffic_down": 21_000_003,
        "traffic_up": 2_700,
    }
    assert not any("tensors" in name for name in found.totals)
    assert "traffic down: 20.0 MiB" in page.markdown(found)
    assert 'data-line="devices.csv"' in page.html(found) and "without MQTT and TLS" in page.html(found)
