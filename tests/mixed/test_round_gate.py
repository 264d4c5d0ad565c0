"""The round gate with real agents over a broker: what a panel of devices costs, and what becomes of a round that one of them poisons."""

from collections.abc import Iterator
from dataclasses import replace as replaced
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from edge_fl.config import MethodConfig, MethodSpec, OptimiserConfig
from edge_fl.data import datasets
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, same, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.wire.messages import Assignment, Report, decode
from edge_fl.wire.tensors import pack
from edge_fl_console.dashboard import prometheus
from edge_fl_devices.agent.effects import Train
from edge_fl_devices.workers.full import FullWorker
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.runs import checkpoint
from edge_fl_server.training import rounds, studies
from edge_fl_server.training.clients import Downs, Step
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.gate import SMALLEST_PANEL
from edge_fl_server.training.rounds import Plan
from tests.mixed.conftest import TOPICS, Site, data_of

EIGHT = tuple(f"d{number}" for number in range(1, 9))
BAD, FROM, ROUNDS = "d3", 3, 4


def poisoned(update: Update) -> Update:
    """The update with noise as large as its weights."""
    drawn = torch.Generator().manual_seed(1)
    parts = {
        part: {
            name: t + 3 * torch.randn(t.shape, generator=drawn) if t.is_floating_point() and t.ndim > 1 else t
            for name, t in params.items()
        }
        for part, params in update.parts.items()
    }
    return replaced(update, parts=parts)


class PoisoningWorker(FullWorker):
    """A device that sends noise from round FROM on."""

    def _run_stage(self, job: Train, method: Method, down: Parts) -> tuple[Update, Parts | None]:
        update, own = super()._run_stage(job, method, down)
        bad = job.assignment.mode == "train" and job.assignment.round >= FROM
        return (poisoned(update) if bad else update), own


class PoisonedClients(SequentialClients):
    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for update in super().each(step, round, method, downs):
            bad = step == "train" and round >= FROM and update.client == BAD
            yield poisoned(update) if bad else update


def learning(recipe: Recipe) -> Recipe:
    """Enough local epochs to learn the toy task, and no screening, so that the gate is alone."""
    method = MethodConfig(recipe.method.name, 20, 8, OptimiserConfig("sgd", 0.1))
    cohort = replace(recipe.cohort, min_devices=8)
    validation = replace(recipe.validation, max_norm=0, max_growth=0)
    release = replace(recipe.release, every=0)
    return replace(recipe, method=method, cohort=cohort, validation=validation, release=release)


def spec_of(recipe: Recipe) -> MethodSpec:
    dataset = datasets.load(recipe.data.dataset, Path(recipe.data.data_dir))
    return studies.method_spec(recipe, dataset.input, dataset.classes)


def simulated(recipe: Recipe) -> list[rounds.RoundResult]:
    spec = spec_of(recipe)
    method = build_method(spec)
    clients = {id: Client(id, data_of(id), 3, spec.method.batch_size, spec.seed) for id in EIGHT}
    return list(rounds.run(method, PoisonedClients(clients, method), Plan.of(recipe, method)))


@pytest.mark.broker
def test_a_poisoned_round_is_repaired_by_real_devices_exactly_as_in_simulation(real_site: Site) -> None:
    assigned: list[tuple[str, Assignment]] = []

    def record(event: object) -> None:
        topic, payload = getattr(event, "topic", ""), getattr(event, "payload", b"")
        if topic.endswith("dn/assignment") and payload:
            assigned.append((TOPICS.parse(topic).device, decode(payload, Assignment)))

    listener = real_site.connect("listener", None, record)
    listener.wait_connected(60)
    listener.subscribe(TOPICS.down("+", "assignment"))
    with real_site.fleet(EIGHT, {}, other={BAD: PoisoningWorker}):
        results = real_site.run("fedavg", ROUNDS, edit=learning)
    listener.close()
    expected = simulated(results.recipe())

    verdicts = [line.verdict for line in results.rounds()]
    assert verdicts == [result.verdict for result in expected]
    assert [verdict.outcome for verdict in verdicts if verdict] == [
        "accepted",
        "accepted",
        "repaired",
        "repaired",
    ]
    assert all(verdict and set(verdict.named) == {BAD} for verdict in verdicts[FROM - 1 :])
    saved = checkpoint.load(results.checkpoints)
    assert same(saved.shared, expected[-1].shared)

    # a device of the panel fetches the candidate alone, and not again as the next broadcast: it fetches no more models than without
    panel = {device for device, one in assigned if one.mode == "compare" and one.round == 1}
    assert len(panel) == SMALLEST_PANEL
    assert all(one.before and one.down for _, one in assigned if one.mode == "compare")
    method = build_method(spec_of(results.recipe()))
    model = len(pack(to_arrays(steps.broadcast(method, saved.shared, BAD))))
    fetched = 0
    for device in EIGHT:
        first, compared, second = (
            bytes_of(real_site, results.id, device, kind, round)
            for kind, round in (("update", 1), ("evaluation", 1), ("update", 2))
        )
        assert (first, compared, second) == (
            ([model], [model], [0]) if device in panel else ([model], [], [model])
        )
        fetched += sum([*first, *compared, *second])
    assert fetched == 2 * len(EIGHT) * model
    answers = [decode(payload, Report) for topic, payload in real_site.packets if "/up/rpt/" in topic]
    assert 0 < max(answer.bytes_up for answer in answers if answer.kind == "evaluation") < 1000

    # the device is named in the registry, and counted in the metrics
    db = Database.open(real_site.folder / "server" / "registry.sqlite")
    counted = prometheus.text(db, "main").decode()
    assert 'edge_fl_gate_rounds_total{fleet="main",outcome="repaired"} 2.0' in counted
    assert 'edge_fl_gate_rounds_total{fleet="main",outcome="accepted"} 2.0' in counted
    assert 'edge_fl_gate_named_devices_total{fleet="main"} 2.0' in counted
    known = {one.device: one for one in registered_devices.listed(db, "main")}
    assert known[BAD].outlier_score >= 1
    assert max(known[device].outlier_score for device in EIGHT if device != BAD) < 1
    assert "repaired" in (results.path / "round_metrics.jsonl").read_text()


def bytes_of(site: Site, run: str, device: str, kind: str, round: int) -> list[int]:
    """What a device fetched for its work of one kind in a round."""
    found = {
        report.id: report.bytes_down
        for topic, payload in site.packets
        if topic == TOPICS.up(device, "rpt", run, round) and (report := decode(payload, Report)).kind == kind
    }
    return list(found.values())
