"""Ray: results equal to the pool's to the bit, on two nodes and with killed workers; nothing is left behind.

`make ray` runs these tests, in an environment of its own.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_fl import TELEMETRY_OFF
from edge_fl.config import ModelConfig
from edge_fl.methods import build_method
from edge_fl_lab.ray import RayClients
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.studies import ClientStore
from tests.leftovers import ROOT, running
from tests.network import allowed, recorded_network
from tests.server.training.engines.test_engines import difference, outcome, pooled, store

ray: Any = pytest.importorskip("ray")
cluster_utils: Any = pytest.importorskip("ray.cluster_utils")

KILLS, KILLS_IN_CI = 10, 2
NODES = [
    {"num_cpus": 1, "node_ip_address": address, "include_dashboard": False}
    for address in ("127.0.0.2", "127.0.0.3")
]
SCRIPT = """
import numpy as np
from edge_fl.console import progress
from edge_fl_lab.research import run
progress.EVERY_S = 0.1
labels = np.arange(120) % 3
images = np.random.default_rng(0).random((120, 1, 8, 8))
run("fedrep", images, labels, clients=4, rounds=100000, engine="ray", progress=True)
"""

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_leaves_no_process_or_file_of_ray(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with running([sys.executable, "script.py"], tmp_path) as command:
        command.wait_for(lambda: command.says("rounds: "))
        assert command.named("raylet") and command.named("gcs_server") and command.folders()
        os.kill(command.process.pid, number)
        command.require_clean_end(command.shared())


QUIET = """
import os, time
from pathlib import Path
import numpy as np
from edge_fl_lab.research import run
labels = np.arange(60) % 3
run("fedavg", np.random.default_rng(0).random((60, 1, 8, 8)), labels, clients=2, rounds=1, engine="ray")
time.sleep(15)
assert os.environ["HOME"] == "{home}" and not (Path.home() / ".ray").exists()
"""


@pytest.mark.skipif(not allowed(), reason="no network namespaces here: only root may make them")
def test_a_cluster_contacts_no_other_host_and_leaves_no_token(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "script.py").write_text(QUIET.replace("{home}", str(tmp_path / "home")))
    variables = {name: value for name, value in os.environ.items() if name not in TELEMETRY_OFF}
    variables |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    with recorded_network(tmp_path) as network:
        command = [*network.prefix, sys.executable, "script.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert not network.foreign()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with one processor each, on this machine's loopback interface."""
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODES[0])
    try:
        cluster.add_node(**NODES[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def spread(at: ClientStore) -> Clients:
    return RayClients(at, build_method(at.settings.spec))


def test_two_nodes_train_a_cohort_with_the_results_of_the_pool(two_nodes: Any, tmp_path: Path) -> None:
    at = store("ditto", ModelConfig("tests.server.networks:Located", {"folder": str(tmp_path)}))
    (found, metrics), (expected, expected_metrics) = outcome(at, spread), outcome(at, pooled)
    assert len(list(tmp_path.iterdir())) == 2, "one node did not train"
    assert difference(found, expected) == 0 and metrics == expected_metrics


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedproto"])
def test_ray_equals_the_pool_to_the_bit(name: str, two_nodes: Any) -> None:
    at = store(name)
    (found, metrics), (expected, expected_metrics) = outcome(at, spread), outcome(at, pooled)
    assert difference(found, expected) == 0 and metrics == expected_metrics


def test_a_model_that_draws_by_itself_equals_the_pool_to_the_bit(two_nodes: Any) -> None:
    at = store("fedrep", ModelConfig("tests.noisy:Noisy"))
    (found, metrics), (expected, expected_metrics) = outcome(at, spread), outcome(at, pooled)
    assert difference(found, expected) == 0 and metrics == expected_metrics


@pytest.mark.parametrize(
    "time",
    [
        *range(KILLS_IN_CI),
        *(pytest.param(time, marks=pytest.mark.nightly) for time in range(KILLS_IN_CI, KILLS)),
    ],
)
def test_a_worker_killed_in_mid_round_changes_nothing(time: int, two_nodes: Any, tmp_path: Path) -> None:
    marker = tmp_path / "armed"
    at = store("ditto", ModelConfig("tests.server.networks:Deadly", {"marker": str(marker)}))
    expected, expected_metrics = outcome(at, pooled)
    marker.touch()
    found, metrics = outcome(at, spread)
    assert not marker.exists(), "no worker died"
    assert difference(found, expected) == 0 and metrics == expected_metrics
