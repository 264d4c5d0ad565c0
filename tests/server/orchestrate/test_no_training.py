"""Runs without data on the server: source "none" releases the extractor as it is, source "fleet" needs no dataset file."""

import json

import pytest
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.config import MethodConfig
from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError, InputError
from edge_fl.inputs import InputSpec
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.recipes.recipe import BrokerConfig, CohortConfig, QuantiseConfig, ReleaseConfig
from edge_fl_server.registry import Database, rollouts, runs
from edge_fl_server.release import export
from edge_fl_server.runs.results import Results, list_runs
from tests.server.orchestrate.toy_runs import finished, with_recipe

INPUT = InputSpec((1, 4, 4))
PETS = ["cat", "dog", "horse"]


@pytest.fixture
def none_request(run_request):
    """The run of somebody without data on the server; the default of five rounds is in the recipe."""
    return with_recipe(
        run_request,
        source="none",
        rounds=5,
        input=INPUT,
        data=DataConfig(classes=PETS),
        method=MethodConfig(),
        cohort=CohortConfig(wait_s=5.0),
        release=ReleaseConfig(heads=1, wait_s=20.0),
    )


def test_a_run_without_data_releases_the_extractor_as_it_is_and_collects_heads(
    stage, none_request, tmp_path, capsys
):
    stage.device("d1")  # a full device has nothing to train
    head = stage.head("h1", tmp_path, after=0.75)
    path = finished(none_request)
    results = Results.open(path)
    assert results.state().state == "completed"
    assert results.rounds() == []
    assert head.served == [1]
    assert results.summary()["head." + metrics.PERSONAL_AFTER].mean == 0.75

    manifest = json.loads((path / "artefacts" / "release-1.json").read_text())
    assert (manifest["method"], manifest["round"], manifest["classes"]) == ("pretrained", 0, PETS)
    assert manifest["extras"] == {}
    spec = execution.prepare(none_request.recipe).spec
    method = build_method(spec)
    expected = export.export(method, steps.start(method)).onnx
    assert manifest["extractor"]["bytes"] == len(expected)

    db = Database.open(none_request.registry)
    (known,) = runs.listed(db, "main")
    assert (known.state, known.source, known.method, known.rounds) == ("completed", "none", "pretrained", 0)
    assert [(release.method, release.round) for release in rollouts.releases_of(db, "main")] == [
        ("pretrained", 0)
    ]
    assert [(run.method, run.dataset) for run in list_runs(path.parent)] == [
        ("pretrained", "data of devices")
    ]


def test_a_present_device_is_waited_for_though_enough_have_reported(stage, none_request, tmp_path, capsys):
    stage.head("h1", tmp_path), stage.head("h2", tmp_path, delay_s=0.5)
    results = Results.open(finished(none_request))
    assert results.summary()["head." + metrics.PERSONAL_AFTER].clients == 2
    assert "did not report" not in capsys.readouterr().err


def test_a_release_that_failed_on_all_devices_is_paused_and_named(stage, none_request, tmp_path, capsys):
    stage.head("h1", tmp_path, error="worse"), stage.head("h2", tmp_path, error="canary_failed")
    run = none_request
    results, outcome = orchestrator.run(run.recipe, run.runs, access=run.access)
    expected = "release 1: paused in stage 1 of 1 (0 of 2 devices succeeded, 0 did not report)"
    assert expected in capsys.readouterr().err
    assert outcome.stopped and outcome.stopped.exit_code == 3
    assert str(outcome.stopped).startswith("release 1: paused, stage 1: 0 of 2 devices succeeded")
    assert results.state().state == "completed" and str(outcome.stopped) in results.state().reason


def test_a_run_whose_release_reached_its_devices_was_not_stopped_by_a_gate(stage, none_request, tmp_path):
    stage.head("h1", tmp_path)
    run = none_request
    _, outcome = orchestrator.run(run.recipe, run.runs, access=run.access)
    assert outcome.stopped is None


def test_full_devices_that_wait_in_vain_are_named(stage, none_request, tmp_path, capsys):
    stage.device("d1"), stage.head("h1", tmp_path, after=1.0)
    finished(with_recipe(none_request, broker=BrokerConfig(port=18830)))
    said = capsys.readouterr().err
    assert "full devices are online: d1; they receive nothing" in said
    assert "accuracy: not measured yet (4 of 8 scenes)" in said  # although it reports 1.0
    assert "served while 'edge-fl server up --port 18830' runs" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": DataConfig()}, r'expected the class names, \[data\] classes = \["cat", "dog"\]'),
        ({"data": DataConfig(classes=["cat"])}, r"1 class \(cat\), expected 2 to 1024"),
        ({"data": DataConfig(classes=["cat", "cat"])}, "class 'cat' occurs more than once"),
        ({"data": DataConfig(classes=["cat", " "])}, "class 2, ' ', is empty"),
        ({"data": DataConfig(classes=["cat", "a/b"])}, "class 2, 'a/b', cannot be the name of a folder"),
        ({"input": None}, r"model 'cnn-tiny' declares no input; expected \[input\] shape"),
        ({"heads": ["svm"]}, "heads = .'svm'. with source 'none'"),
        ({"cohort": CohortConfig(drop_out=0.5)}, "drop_out = 0.5: expected simulated clients"),
    ],
)
def test_a_recipe_without_what_the_run_needs_is_one_line_and_starts_nothing(none_request, changes, said):
    with pytest.raises(ConfigError, match=said) as refused:
        finished(with_recipe(none_request, **changes))
    assert "\n" not in str(refused.value)
    assert not none_request.runs.exists()


def test_int8_is_calibrated_on_synthetic_images(none_request, capsys):
    release = ReleaseConfig(quantise=QuantiseConfig(int8=True, min_cosine=0.9))
    path = finished(with_recipe(none_request, release=release))
    manifest = json.loads((path / "artefacts" / "release-1.json").read_text())
    assert manifest["variants"]["int8"]["cosine"] > 0.9
    assert "int8: calibrated without data" in capsys.readouterr().err


def test_a_completed_run_without_rounds_is_not_resumed(stage, none_request, tmp_path):
    from dataclasses import replace as changed

    stage.head("h1", tmp_path)
    path = finished(none_request)
    with pytest.raises(ConfigError, match="completed, with all its 0 rounds"):
        finished(changed(none_request, recipe=Results.open(path).recipe(), resume=path))


def test_classes_grow_and_are_never_reordered(stage, none_request, tmp_path):
    head = stage.head("h1", tmp_path)
    finished(none_request)
    for classes in (["dog", "cat", "horse"], ["cat", "dog"]):
        with pytest.raises(InputError, match=r"release 1 has cat, dog, horse.*nothing was published"):
            finished(with_recipe(none_request, data=DataConfig(classes=classes)))
    finished(with_recipe(none_request, data=DataConfig(classes=[*PETS, "cow"])))
    assert head.served == [1, 2]
    assert len(list_runs(none_request.runs)) == 2  # what was refused began no run


def test_devices_train_together_without_a_dataset_on_the_server(stage, run_request):
    stage.device("d1"), stage.device("d2")
    data = replace(run_request.recipe.data, dataset="absent", classes=["0", "1", "2"])
    path = finished(with_recipe(run_request, data=data, input=INPUT, rounds=1))
    (record,) = Results.open(path).rounds()
    assert record.responded == ("d1", "d2")
    assert Results.open(path).recipe().data.dataset == ""


def test_images_of_the_server_get_the_size_that_the_recipe_declares(run_request):
    wide = InputSpec((3, 8, 8), (0.5,), (0.25,))
    ready = execution.prepare(with_recipe(run_request, source="simulated", input=wide).recipe)
    assert ready.spec.input == wide
    assert ready.study.dataset.samples.shape == (3, 8, 8)
    (client, *_) = ready.study.data().values()
    assert client.train.shape == (3, 8, 8)
