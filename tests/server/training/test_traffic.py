"""Bytes of a round are those of the tensors that travel, as docs/methods.md lists them for every method."""

import pytest

from edge_fl.learn.tree import parameters, size_bytes
from edge_fl.methods import build_method
from edge_fl_server.orchestrate.execution import simulate
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training import studies
from tests.rounds_seen import RoundsSeen

FLOAT = 4
CLIENTS, CLASSES, DIM = 3, 10, 8
TINY = with_settings(
    Recipe(name="tiny"),
    [
        f"data.clients={CLIENTS}",
        "data.fraction=0.2",
        "rounds=1",
        "evaluate_every=0",
        f"model.options={{feature_dim={DIM}, width=4, norm=false}}",
    ],
)


def traffic(method: str, *settings: str) -> tuple[int, int, int, int]:
    """Bytes down and up per client of a round, and of the net's extractor and head."""
    study = studies.prepare(with_settings(TINY, [f'method.name="{method}"', *settings]))
    seen = RoundsSeen()
    simulate(study, seen)
    net = build_method(study.spec).net
    sizes = [
        FLOAT * sum(t.numel() for t in parameters(part.init()).values()) for part in (net.extractor, net.head)
    ]
    (result,) = seen.results
    assert result.bytes_down % len(result.selected) == result.bytes_up % len(result.responded) == 0
    return (
        result.bytes_down // len(result.selected),
        result.bytes_up // len(result.responded),
        sizes[0],
        sizes[1],
    )


@pytest.mark.parametrize("method", ["fedavg", "fedavg+ft", "fedprox", "ditto"])
def test_a_whole_model_travels_down_and_up(method: str) -> None:
    down, up, f, h = traffic(method)
    assert down == up == f + h


def test_moons_projection_belongs_to_the_model() -> None:
    down, up, f, h = traffic("moon", "method.options.moon_proj=256")
    assert down == up == f + h + FLOAT * ((DIM + 1) * DIM + (DIM + 1) * 256)
    assert h == FLOAT * 257 * CLASSES


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu", "repper"])
def test_only_the_extractor_travels(method: str) -> None:
    down, up, f, _ = traffic(method)
    assert down == up == f


def test_nothing_travels_when_everyone_is_alone() -> None:
    assert traffic("local")[:2] == (0, 0)


def test_fedcrc_sends_its_global_head_along() -> None:
    down, up, f, h = traffic("fedcrc")
    assert down == up == f + h


def test_lg_fedavg_sends_heads_only() -> None:
    down, up, _, h = traffic("lg-fedavg")
    assert down == up == h


def test_the_whole_cohort_is_counted_and_nobody_else() -> None:
    settings = ["cohort.participation=0.67", 'method.name="fedavg"']
    study = studies.prepare(with_settings(TINY, settings))
    seen = RoundsSeen()
    outcome = simulate(study, seen)
    assert len(seen.results[0].selected) == 2
    assert seen.results[0].bytes_down == seen.results[0].bytes_up == 2 * size_bytes(outcome.shared)
