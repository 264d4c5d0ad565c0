"""Head-only and full devices in one run: every method works on the tiers stated in docs/methods.md; only declared parts leave a device."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.blob import Assembly
from edge_fl.data import datasets
from edge_fl.errors import MethodError
from edge_fl.methods import METHODS, build_method, find, names
from edge_fl.methods.contract import norm
from edge_fl.methods.contract.client import Client
from edge_fl.wire import tensors
from edge_fl.wire.messages import MESSAGES, DeviceState, Report, decode
from edge_fl_server.recipes.recipe import Recipe, ReleaseConfig
from edge_fl_server.runs import round_metrics
from edge_fl_server.training import rounds, studies
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan
from tests.mixed.conftest import TOPICS, Site, data_of
from tests.sample import sample

FULL = ("d1", "d2")
HEADS = {"h1": "logistic", "h2": "svm"}
ABLE = sorted(name for name, method in METHODS.items() if method.head_tier.kind != "none")


def sent(site: Site, device: str) -> list[tuple[Report, dict[str, Any]]]:
    """The reports of a device as they were on the wire, each with its parts."""
    chunks: dict[str, dict[int, bytes]] = {}
    found = {}
    for topic, payload in site.packets:
        address = TOPICS.parse(topic)
        if address.device != device:
            continue
        if address.kind == "blob":
            chunks.setdefault(address.path[0], {})[int(address.path[1])] = payload
        elif address.kind == "rpt":
            report = decode(payload, Report)
            found[report.id] = report
    return [(report, _parts(report, chunks.get(report.id, {}))) for report in found.values()]


def _parts(report: Report, chunks: dict[int, bytes]) -> dict[str, Any]:
    if report.blob is None:
        return {}
    assembly = Assembly(report.blob)
    for index, payload in chunks.items():
        assembly.add(index, payload)
    return tensors.unpack(assembly.join())


def simulated(recipe: Recipe) -> dict[str, dict[str, float]]:
    """The metrics of the full devices after the same run in simulation."""
    dataset = datasets.load(recipe.data.dataset, Path(recipe.data.data_dir))
    spec = studies.method_spec(recipe, dataset.input, dataset.classes)
    method, batch_size = build_method(spec), spec.method.batch_size
    clients = {id: Client(id, data_of(id), len(spec.classes), batch_size, spec.seed) for id in FULL}
    fleet = SequentialClients(clients, method)
    (result,) = rounds.run(method, fleet, Plan.of(recipe, method))
    _, final = rounds.final_personalisation(method.at(1), fleet, result.shared, 1)
    return {id: {**result.metrics.get(id, {}), **final[id]} for id in FULL}


def require_nothing_private(site: Site) -> None:
    """No image, list of labels or feature matrix of any device is in any packet; every blob holds declared parts only."""
    for name in (*FULL, *HEADS):
        data = data_of(name)
        whole = b"".join(payload for topic, payload in site.packets if f"/d/{name}/" in topic)
        for row in data.train.x:
            assert row.tobytes() not in whole
        for kind in ("int64", "int32", "uint8", "float32"):
            assert data.train.y.astype(kind).tobytes() not in whole
        assert json.dumps(data.train.y.tolist()).replace(" ", "").encode() not in whole


def check_run(site: Site, name: str, **options: Any) -> None:
    tier = find(name).head_tier
    rounds = 3 if tier.updates and not tier.final else 1  # what comes too late for round 2 joins round 3
    with site.fleet(FULL, HEADS):
        results = site.run(name, rounds, **options)
    assert results.state().state == "completed"
    rows = results.rounds()
    assert all(len(row.responded) == 2 for row in rows)
    for head in HEADS:
        reports = sent(site, head)
        assert {report.kind for report, _ in reports} == {"head"}
        assert not [report.error for report, _ in reports if report.error]
        assert len(reports) == (rounds if not tier.final else 2)
        parts = {part for _, held in reports for part in held}
        assert parts <= set(tier.updates)
        last = max(reports, key=lambda item: item[0].release)
        assert not last[1]
    if tier.updates:
        assert any(held for _, held in sent(site, "h1"))
        if not tier.final:
            assert rows[-1].head_updates + rows[-2].head_updates
    for full in FULL:
        for _, parts in sent(site, full):
            declared = find(name).parts
            assert parts.keys() <= {*declared, *(part + norm.EXPORT for part in declared)}
            assert all(declared[part.removesuffix(norm.EXPORT)].travels for part in parts)
    require_nothing_private(site)


OPTIONAL = {"fedrir.r_squared"}  # needs more images than a device of these tests has


# One of each kind of head tier, and of parts that travel.
QUICKLY = ["fedavg+ft", "fedcrc", "repper", "spherefed"]
SLOWLY = [name for name in (*ABLE, "fedavg+ft", "fedprox+ft") if name not in QUICKLY]
IN_CI = ["class-statistics", "gpfl"]
ON_A_BROKER = [*IN_CI, "fedavg+ft", "fedcrc", "fedproto"]


@pytest.mark.parametrize("name", [*QUICKLY, *sample(SLOWLY, IN_CI, pytest.mark.slow)])
def test_a_mixed_fleet_runs_under_every_method_that_allows_it(site: Site, name: str) -> None:
    check_run(site, name)


@pytest.mark.broker
@pytest.mark.parametrize("name", sample(["fedcrc", "fedcrl", "repper", "spherefed"], ["fedcrc", "spherefed"]))
def test_a_mixed_fleet_runs_over_a_real_broker(real_site: Site, name: str) -> None:
    check_run(real_site, name)
    # enrolment needs certificates, a run adds nothing up by a secure sum, and nobody asks, changes settings or updates the agent
    families = {
        kind for kind in MESSAGES if not kind.startswith(("enrol", "sum", "query", "agent", "settings"))
    }
    assert real_site.families == {*families, "tuf", "art", "blob"}


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("name", sample(names(), ON_A_BROKER))
def test_every_device_reports_its_accuracies_under_every_method_over_a_real_broker(
    real_site: Site, name: str
) -> None:
    """Full devices report accuracies after the final personalisation; head-only ones where the method shares an extractor."""
    with real_site.fleet(FULL, HEADS):
        results = real_site.run(name, 1, edit=lambda recipe: replace(recipe, evaluate_every=1))
    assert (results.state().state, results.state().reason) == ("completed", "")
    final = round_metrics.lines(results.path / round_metrics.FILE)[-1]
    assert final.final
    reporting = {*FULL, *(HEADS if find(name).exports else ())}
    assert final.clients.keys() == reporting
    for device in reporting:
        assert 0 <= final.clients[device][metrics.PERSONAL_AFTER] <= 1
    for device in FULL:
        assert {report.kind for report, _ in sent(real_site, device)} >= {"update", "personal"}
        assert not [report.error for report, _ in sent(real_site, device) if report.error]
        assert final.clients[device].keys() >= set(find(name).measures) - OPTIONAL
    if not find(name).head_tier.final:  # else the head-only devices contribute to the final personalisation
        assert {device: dict(final.clients[device]) for device in FULL} == simulated(results.recipe())


def test_a_device_that_shares_nothing_sends_metrics_only(site: Site) -> None:
    with site.fleet(FULL, HEADS, share=False):
        results = site.run("fedcrc", 2)
    assert [row.head_updates for row in results.rounds()] == [(), ()]
    assert not [parts for head in HEADS for _, parts in sent(site, head) if parts]
    assert len([report for head in HEADS for report, _ in sent(site, head) if report.metrics]) == 4


def test_head_only_devices_rest_in_a_run_without_an_extractor(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.fleet(FULL, HEADS):
        site.run("local", 1)
    for head in HEADS:
        said = [
            decode(payload, DeviceState)
            for topic, payload in site.packets
            if topic == TOPICS.up(head, "state")
        ]
        assert ("alert", "no_extractor") in [(state.status, state.why) for state in said]
        assert not sent(site, head)
    assert "shares no extractor" in capsys.readouterr().err


def test_a_recipe_that_expects_heads_of_a_method_without_an_extractor_is_rejected_early(site: Site) -> None:
    def expecting(recipe: Recipe) -> Recipe:
        return replace(recipe, release=ReleaseConfig(heads=1))

    with pytest.raises(MethodError, match=r"Local shares no extractor.*methods with one: .*fedcrc"):
        site.run("local", 1, edit=expecting)
    assert not (site.folder / "runs").exists()
