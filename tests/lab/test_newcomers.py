"""New clients: those left out never train, they get the global model or averaged heads, and a new task does not change the extractor."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from edge_fl import config, metrics
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError, MethodError
from edge_fl.learn import tree
from edge_fl.learn.tree import Params
from edge_fl.methods import build_method, names
from edge_fl.methods.contract import steps
from edge_fl_lab import newcomers as newclients
from edge_fl_lab.newcomers import HeadTraining, learn_new_task, meet, newcomers_model
from edge_fl_server.orchestrate.execution import RunResult, simulate
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, with_settings
from edge_fl_server.training import cohorts, studies
from edge_fl_server.training.rounds import RoundResult
from edge_fl_server.training.studies import draw_unseen
from tests.rounds_seen import RoundsSeen

TINY = with_settings(
    Recipe(name="tiny"),
    [
        "data.clients=5",
        "data.fraction=0.3",
        "data.unseen=2",
        "rounds=2",
        "model.options={feature_dim=8, width=4}",
    ],
)


def run(method: str) -> tuple[studies.Study, list[RoundResult], RunResult]:
    study = studies.prepare(with_settings(TINY, [f"method.name={method}"]))
    seen = RoundsSeen()
    outcome = simulate(study, seen)
    return study, seen.results, outcome


def met(outcome: RunResult) -> dict[str, Mapping[str, float]]:
    """The metrics of the clients that never trained."""
    return {
        id: report
        for id, report in outcome.final.items()
        if report.keys() & {metrics.UNSEEN_TEST, metrics.UNSEEN_AFTER}
    }


def test_clients_left_out_never_train_and_are_all_met() -> None:
    study, seen, outcome = run("fedavg")
    newcomers = set(study.unseen)
    assert len(newcomers) == 2 and len(study.data()) == 3
    assert all(not newcomers & set(result.selected) for result in seen)
    assert outcome.final.keys() == set(study.split.clients)
    assert met(outcome).keys() == newcomers
    assert outcome.last()[metrics.UNSEEN_TEST].clients == 2
    assert outcome.last()["global.test_acc"].clients == 3


def test_newcomers_get_the_global_model_without_any_adaptation() -> None:
    study, _, outcome = run("fedavg")
    model = newcomers_model(outcome.method, outcome.shared, [], {})
    assert model is not None
    for id, data in study.unseen_data().items():
        with torch.no_grad():
            found = model(torch.empty(0))(torch.from_numpy(data.test.x) / 255).argmax(1).numpy()
        assert outcome.final[id][metrics.UNSEEN_TEST] == metrics.accuracy(found, data.test.y)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "repper", "fedcrc", "local"])
def test_newcomers_fine_tune_a_head_on_the_frozen_extractor(method: str) -> None:
    plain = simulate(studies.prepare(with_settings(TINY, [f"method.name={method}"])))
    settings = [f"method.name={method}", "data.unseen_epochs=60"]
    tuned = simulate(studies.prepare(with_settings(TINY, settings)))
    assert tree.same(plain.shared, tuned.shared)
    if method == "local":  # it shares no extractor
        assert metrics.UNSEEN_AFTER not in tuned.last()
        return
    found = [report[metrics.UNSEEN_AFTER] for report in met(tuned).values()]
    assert len(found) == 2 and tuned.last()[metrics.UNSEEN_AFTER].mean > 0.2  # 0.1 by chance
    if metrics.UNSEEN_TEST in plain.last():
        assert tuned.last()[metrics.UNSEEN_TEST] == plain.last()[metrics.UNSEEN_TEST]
        assert tuned.last()[metrics.UNSEEN_AFTER].mean > plain.last()[metrics.UNSEEN_TEST].mean


def test_personal_heads_are_averaged_by_samples_over_those_that_took_part() -> None:
    study = studies.prepare(with_settings(TINY, ["method.name=fedper"]))
    method = build_method(study.spec)
    shared, x = steps.start(method), torch.rand(3, 1, 8, 8)

    def head(value: float) -> Params:
        return {name: torch.full_like(t, value) for name, t in method.net.head.init().items()}

    own = [("c000", {"head": head(1.0)}), ("c001", {"head": head(4.0)}), ("c002", {"head": head(99.0)})]
    model = newcomers_model(method, shared, own, {"c000": 30, "c001": 10})
    assert model is not None
    expected = method.classify({**shared, "head": head((30 * 1 + 10 * 4) / 40)}, x)
    assert torch.allclose(model(torch.empty(0))(x), expected)


@pytest.mark.parametrize(
    "method", ["local", "repper", "fedamp", "fedcac", "fedcp", "fedpac", "fedrir", "gpfl"]
)
def test_a_method_without_a_model_for_new_clients_gives_no_number_and_says_so(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, outcome = run(method)
    assert met(outcome) == {} and metrics.UNSEEN_TEST not in outcome.last()
    assert f"{outcome.method.title}: has no model for new clients" in caplog.text


def test_every_method_runs_with_clients_that_never_train() -> None:
    settings = ["rounds=1", "data.fraction=0.2", "model.options={feature_dim=16, width=4}"]
    study = studies.prepare(with_settings(TINY, settings))
    for name in names():
        outcome = simulate(study.with_method(config.MethodConfig(name)))
        assert met(outcome).keys() in (set(), set(study.unseen)), name


@pytest.mark.parametrize(("layers", "measured"), [(0, False), (1, True), (2, False)])
def test_averaged_heads_need_a_whole_shared_extractor(layers: int, measured: bool) -> None:
    study = studies.prepare(
        with_settings(TINY, ["method.name=fedper", f"method.options.personal_layers={layers}"])
    )
    assert bool(met(simulate(study))) == measured


def test_fedbns_newcomer_measures_batch_norm_on_its_own_pixels() -> None:
    study = studies.prepare(with_settings(TINY, ["method.name=fedbn"]))
    outcome = simulate(study)
    (first, data), *_ = sorted(study.unseen_data().items())
    model = newcomers_model(outcome.method, outcome.shared, [], {})
    assert model is not None
    x = torch.from_numpy(data.test.x) / 255
    own = model(torch.from_numpy(data.train.x))(x)
    assert outcome.final[first][metrics.UNSEEN_TEST] == metrics.accuracy(own.argmax(1).numpy(), data.test.y)
    assert not torch.allclose(own, model(torch.zeros(4, 1, 8, 8, dtype=torch.uint8))(x), atol=1e-3)


def test_the_same_clients_are_left_out_whatever_the_method() -> None:
    clients = [f"c{n:03d}" for n in range(100)]
    assert (
        draw_unseen(clients, 40, seed=1)
        == draw_unseen(clients, 40, seed=1)
        != draw_unseen(clients, 40, seed=2)
    )
    assert len(set(draw_unseen(clients, 40, seed=1))) == 40
    assert draw_unseen(clients, 0, seed=1) == ()
    with pytest.raises(DataError, match="expected fewer"):
        draw_unseen(clients, 100, seed=1)


def test_an_accuracy_of_newcomers_is_over_their_own_test_sets() -> None:
    x = np.zeros((4, 1, 2, 2), np.uint8)
    data = ClientData(
        Samples(x, np.zeros(4, np.int64)),
        Samples(x[:0], np.zeros(0, np.int64)),
        Samples(x, np.array([0, 1, 1, 1])),
    )

    def always_one(batch: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0]]).expand(len(batch), 2)

    assert meet(lambda _: always_one, {"c9": data}) == {
        "c9": {metrics.UNSEEN_TEST: 0.75, metrics.TEST_SAMPLES: 4.0}
    }


def new_task(study: studies.Study, classes: int) -> dict[str, ClientData]:
    """The same images under other labels."""

    def relabelled(samples: Samples) -> Samples:
        return Samples(samples.x, samples.y % classes)

    return {
        id: ClientData(relabelled(d.train), relabelled(d.validation), relabelled(d.test))
        for id, d in study.data().items()
    }


@pytest.mark.parametrize("method", ["repper", "fedavg"])
@pytest.mark.parametrize("head", sorted(newclients.HEADS))
def test_new_heads_learn_another_task_on_the_extractor_as_it_is(method: str, head: str) -> None:
    study, _, outcome = run(method)
    before = tree.clone(outcome.shared)
    training = HeadTraining(iterations=40, every=20, head=head)
    found = learn_new_task(outcome.method, outcome.shared, new_task(study, 2), 2, training)
    assert tree.same(before, outcome.shared)
    assert list(found) == [0, 20, 40]
    means = [np.mean([r[metrics.PERSONAL_AFTER] for r in reports.values()]) for reports in found.values()]
    assert means[2] > 0.65 and means[2] > means[0]
    assert learn_new_task(outcome.method, outcome.shared, new_task(study, 2), 2, training) == found


def test_a_new_task_that_does_not_fit_is_refused() -> None:
    study, _, outcome = run("fedavg")
    wide = Samples(np.zeros((4, 1, 9, 9), np.uint8), np.zeros(4, np.int64))
    with pytest.raises(DataError, match=r"\[1, 9, 9\], the extractor takes \[1, 8, 8\]"):
        learn_new_task(
            outcome.method, outcome.shared, {"c0": ClientData(wide, wide, wide)}, 2, HeadTraining()
        )
    with pytest.raises(MethodError, match="unknown"):
        learn_new_task(outcome.method, outcome.shared, new_task(study, 2), 2, HeadTraining(head="tree"))
    _, _, alone = run("local")
    with pytest.raises(MethodError, match="shares no extractor"):
        learn_new_task(alone.method, alone.shared, new_task(study, 2), 2, HeadTraining())


def test_a_cohort_of_drawn_size_stays_within_its_share() -> None:
    """docs/methods.md G12: m is uniform over floor(a N)..floor(rho N), anew in every round."""
    clients = [f"c{n:03d}" for n in range(20)]
    drawn = CohortConfig(participation=1.0, participation_from=0.5)
    sizes = [len(cohorts.draw(clients, drawn, 0, number)) for number in range(1, 301)]
    assert set(sizes) == set(range(10, 21))
    assert np.mean(sizes) == pytest.approx(15, abs=0.6)
    fixed = CohortConfig(participation=0.5)
    assert cohorts.draw(clients, fixed, 0, 1) == cohorts.draw(clients, fixed, 0, 1)
    assert {len(cohorts.draw(clients, fixed, 0, number)) for number in range(1, 20)} == {10}


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedetf"])
def test_newcomers_serve_the_fleets_head_adapted_to_their_labels(method: str) -> None:
    """Also where the shared head is under-trained (fedavg), or has a factor of its own (fedetf)."""
    settings = ["data.clients=12", "data.unseen=4", "data.max_train=10", "rounds=8", f"method.name={method}"]
    heads = 'heads=["served","logistic"]'
    found = simulate(
        studies.prepare(with_settings(Recipe(name="tiny"), [*settings, heads])), RoundsSeen()
    ).last()
    served, own = found[metrics.of_head("served")], found[metrics.of_head("logistic")]
    assert served.mean > own.mean + 0.1 and served.clients == own.clients == 8
    newcomers = found[metrics.UNSEEN_SERVED]
    assert newcomers.mean > own.mean + 0.1 and newcomers.clients == 4
