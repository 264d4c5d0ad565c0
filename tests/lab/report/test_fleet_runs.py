"""The report of runs over a broker: where nothing was trained on the server, and where no full device could be measured."""

import pytest

from edge_fl.config import MethodConfig
from edge_fl.data.partition import DataConfig
from edge_fl.errors import InputError
from edge_fl.inputs import InputSpec
from edge_fl_lab import trained
from edge_fl_lab.report import page
from edge_fl_server.recipes.recipe import CohortConfig, ReleaseConfig
from edge_fl_server.runs.results import Results
from tests.server.orchestrate.conftest import run_request
from tests.server.orchestrate.toy_runs import finished, refusing, with_recipe

__all__ = ["run_request"]


def test_the_report_of_a_run_without_training_says_so(stage, run_request, tmp_path, capsys):
    stage.head("h1", tmp_path, after=0.75)
    request = with_recipe(
        run_request,
        source="none",
        input=InputSpec((1, 4, 4)),
        data=DataConfig(classes=["cat", "dog", "horse"]),
        method=MethodConfig(),
        cohort=CohortConfig(wait_s=5.0),
        release=ReleaseConfig(heads=1, wait_s=20.0),
    )
    results = Results.open(finished(request))
    written = page.write(results).read_text()
    assert written.startswith("<!doctype html>")
    assert page.SOURCES["none"] in written and "data of devices" in written
    with pytest.raises(InputError, match="source 'none' are on the devices"):
        trained.load(results)


def test_the_report_says_why_no_full_device_was_measured(stage, run_request):
    for id in ("d1", "d2"):
        stage.device(id, tamper=refusing("evaluate", "personalise"))
    results = Results.open(finished(with_recipe(run_request, evaluate_every=1)))
    reason = results.state().reason
    assert reason and reason in page.write(results).read_text()
