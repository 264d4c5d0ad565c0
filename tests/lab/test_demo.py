"""The demo: three real commands as child processes that always end, and a comparison with baselines."""

import csv
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.cli import App
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, RunError
from edge_fl_broker.find import Program
from edge_fl_lab import demo
from edge_fl_lab.cli import demo as demo_command
from edge_fl_lab.demo import DemoOptions
from edge_fl_lab.report import page
from edge_fl_server.children import CommandProcesses
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics
from tests.devices.deadly import deadly

ROWS = [
    {"device": "sim-000", "tier": "head", "after": 0.5},
    {"device": "sim-001", "tier": "full", "after": 1.0},
    {"device": "sim-002", "tier": "head", "after": None},
]


def test_the_fleet_is_compared_with_baselines_over_all_and_over_head_only_clients():
    baselines = {"Local": {"c000": 0.25, "c001": 0.5, "c002": 0.75}}
    found = {line["model"]: (line["clients"], line["mean"]) for line in demo.compare(ROWS, baselines)}
    assert found == {
        "this fleet, all": (2, 0.75),
        "this fleet, head-only": (1, 0.5),
        "Local, all": (3, 0.5),
        "Local, head-only": (2, 0.5),
    }


def test_the_run_s_report_compares_each_device_with_training_on_its_own_data_alone(tmp_path):
    """Twelve devices; the last one was never evaluated."""
    names = [f"sim-{n:03d}" for n in range(12)]
    clients = {name: {metrics.PERSONAL_AFTER: 0.9, metrics.TEST_SAMPLES: 10.0} for name in names[:-1]}
    with Results.create(tmp_path, Recipe(name="demo", source="fleet")) as results:
        results.write_devices(
            [{"device": name, "tier": "head", "samples": 5, "bytes_up": 1} for name in names]
        )
        results.append_round(RoundMetrics(round=3, final=True, clients=clients))
    demo.record_local_only(results.path, {f"c{n:03d}": 0.5 + n / 100 for n in range(12)})
    (group,) = page.report(Results.open(results.path)).groups
    (gain,) = group.gains
    assert (gain.difference.metric, gain.difference.against) == (metrics.PERSONAL_AFTER, metrics.LOCAL_ONLY)
    assert gain.n.value == 11 and gain.difference.value == pytest.approx(0.9 - 0.55)
    assert "training on the client's own data alone" in (results.path / "report.html").read_text().replace(
        "&#39;", "'"
    )
    assert Results.open(results.path).state().state == "completed"


def test_raw_pixels_are_fitted_on_train_and_measured_on_test():
    dark, bright = np.zeros((6, 1, 2, 2), np.uint8), np.full((6, 1, 2, 2), 200, np.uint8)
    train = Samples(np.concatenate([dark, bright]), np.repeat([0, 1], 6))
    turned = Samples(train.x, 1 - train.y)
    assert demo.raw_pixels(ClientData(train, train, train), 2) == 1.0
    assert demo.raw_pixels(ClientData(train, train, turned), 2) == 0.0


@pytest.mark.parametrize(("devices", "full"), [(4, 4), (4, 0), (4, 9)])
def test_there_must_be_full_and_head_only_devices(devices, full):
    with pytest.raises(ConfigError, match=f"{full} full devices of {devices}"):
        demo.recipe_of(DemoOptions(devices=devices, full=full))


def test_only_a_part_of_a_large_dataset_is_used(tmp_path):
    np.savez(tmp_path / "large.npz", x=np.zeros((4000, 4, 4), np.uint8), y=np.arange(4000) % 3)
    recipe = demo.recipe_of(DemoOptions("large", tmp_path, devices=4, full=2, rounds=3))
    assert recipe.data.fraction * 4000 == 4 * demo.SAMPLES_PER_DEVICE
    assert (recipe.rounds, recipe.release.every, recipe.cohort.min_devices) == (3, 2, 2)
    assert demo.recipe_of(DemoOptions()).data.fraction == 1.0


def test_fleet_and_server_get_the_same_split_and_broker(tmp_path):
    recipe = demo.recipe_of(DemoOptions(devices=5, full=2, port=1999))
    commands = demo.commands(DemoOptions(devices=5, full=2), recipe, tmp_path)
    pairs = list(zip(commands["fleet"][2::2], commands["fleet"][3::2], strict=True))
    fleet = dict(pairs)
    assert (fleet["--head-only"], fleet["--full"], fleet["--port"]) == ("3", "2", "1999")
    assert (fleet["--dataset"], fleet["--data-dir"]) == (recipe.data.dataset, recipe.data.data_dir)
    settings = [word for name, word in pairs if name == "--set"]
    split = {f"data.{name}={getattr(recipe.data, name)}" for name in ("partition", "beta", "fraction")}
    assert set(settings) == {*split, f"seed={recipe.seed}"}
    assert commands["broker"][commands["broker"].index("--port") + 1] == "1999"
    assert (tmp_path / "recipe.toml").read_text().count("1999") == 1


def test_every_command_of_the_demo_exists(tmp_path):
    from edge_fl_broker.cli import register as of_broker
    from edge_fl_devices.cli import register as of_devices
    from edge_fl_server.cli import register as of_server

    app = App()
    for register in (of_broker, of_devices, of_server):
        register(app)
    commands = demo.commands(DemoOptions(), Recipe(), tmp_path)
    for group, command, *_ in (*commands.values(), demo.enrolment(DemoOptions(), tmp_path)):
        assert command in {
            found.name or found.callback.__name__ for found in app.group(group).registered_commands
        }


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_error_of_a_failed_child_names_it_with_its_last_line():
    lines = []
    with CommandProcesses(lambda name, line: lines.append((name, line)), {}) as children:
        wrong = children.start("server", "server", "run", "nosuchrecipe")
        with pytest.raises(RunError, match="server ended with exit code 4: recipe 'nosuchrecipe'"):
            children.wait(wrong, 30)
    assert [name for name, _ in lines] == ["server"]


def test_a_child_that_a_signal_ended_is_an_error_with_its_name(tmp_path, monkeypatch):
    deadly(tmp_path / "site", monkeypatch, "nosuchrecipe", "SIGBUS", when="edge_fl.cli")
    with CommandProcesses(lambda name, line: None, {}) as children:
        ended = children.start("server", "server", "run", "nosuchrecipe")
        with pytest.raises(RunError, match=r"server was ended by SIGBUS \(bus error\): no output"):
            children.wait(ended, 30)


@pytest.mark.broker
def test_children_end_after_an_interrupt(mosquitto_program, tmp_path):
    lines = []
    with (
        pytest.raises(KeyboardInterrupt),
        CommandProcesses(lambda name, line: lines.append(line), {}) as children,
    ):
        port = str(demo._free_port())
        child = children.start(
            "broker", "broker", "up", "--insecure", "--port", port, "--dir", str(tmp_path / "broker")
        )
        with pytest.raises(DeadlineError, match="still running after"):
            children.wait(child, 0.5)
        until = time.monotonic() + 20
        while not lines and time.monotonic() < until:
            time.sleep(0.05)
        assert port in lines[0]
        raise KeyboardInterrupt
    assert child.code == 0
    assert not alive(child._process.pid)


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plaintext", "mTLS"])
def test_the_demo_completes_and_leaves_only_its_results(mosquitto_program, tmp_path, secure):
    plan = DemoOptions(devices=4, full=2, rounds=2, runs=tmp_path / "runs", secure=secure)
    shown = demo.run(plan)
    assert [entry.name for entry in plan.runs.iterdir()] == [shown.path.name]
    results = Results.open(shown.path)
    assert results.state().state == "completed"
    assert results.summary()["head." + metrics.PERSONAL_AFTER].clients == 2
    assert results.summary()["full." + metrics.PERSONAL_AFTER].clients == 2
    rows = list(csv.DictReader((shown.path / "devices.csv").read_text().splitlines()))
    assert sorted(row["tier"] for row in rows) == ["full", "full", "head", "head"]
    assert all(row["before"] and row["release"] == "2" for row in rows if row["tier"] == "head")
    assert len(shown.comparison) == 8
    assert not any(math.isnan(line["mean"]) for line in shown.comparison)
    with closing(Database.existing(str(shown.path / demo.REGISTRY))) as db:
        assert len(registered_devices.listed(db, "main")) == 4
    assert re.search(
        r"training on the client's own data alone .* Lowest: sim-00\d, \d+\.\d % of \d+ test", shown.verdict
    )


def paths(output: str, folder: Path) -> list[Path]:
    """Every path in an output, also inside a command; relative ones below `folder`."""
    words = [word.strip("\"'`,;:()[]") for word in output.split()]
    no_paths = re.compile(r"\w+://|\d+/\d+$|[\d.]+/min$")
    found = [word for word in words if not no_paths.match(word)]
    return [
        folder / word
        for word in found
        if "/" in word or re.search(r"\.(sqlite|html|log|json|key|toml)$", word)
    ]


def test_every_path_of_an_output_is_found(tmp_path):
    output = f"""broker | mosquitto 2.0.11 on mqtt://127.0.0.1:80 (CA in {tmp_path}/ca); log {tmp_path}/a.log; stop
fleet | 0/12 connected
server | run runs/demo-1: RepPer, round 1/6: 4 of 4
rounds: 4 of 6, 25.2/min
report.html
next: .venv/bin/edge-fl server dashboard --database 'runs/demo-1/registry.sqlite'
"""
    names = [
        "ca",
        "a.log",
        "runs/demo-1",
        "report.html",
        ".venv/bin/edge-fl",
        "runs/demo-1/registry.sqlite",
    ]
    assert paths(output, tmp_path) == [tmp_path / name for name in names]


@pytest.fixture
def slow_broker(mosquitto_program: Program, tmp_path: Path) -> dict[str, str]:
    """Variables with which mosquitto needs longer to listen than a fleet needs to start."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mosquitto").write_text(
        f'#!/bin/sh\n[ "$1" = -h ] || sleep 5\nexec {shlex.quote(str(mosquitto_program.path))} "$@"\n'
    )
    (folder / "mosquitto").chmod(0o755)
    variables = {**os.environ, **mosquitto_program.environment, "OMP_NUM_THREADS": "1"}
    return variables | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.broker
def test_nothing_that_connects_is_started_before_the_broker_listens(slow_broker, tmp_path):
    """Each child is started with the number of the port and whether it was open by then."""
    port, started = demo._free_port(), []

    class Recorded(CommandProcesses):
        def start(self, name, *arguments):
            with socket.socket() as probe:
                started.append((name, probe.connect_ex(("127.0.0.1", port)) == 0))
            return super().start(name, *arguments)

    plan = DemoOptions(devices=2, full=1, port=port)
    with Recorded(lambda name, line: None, slow_broker) as children:
        demo._start(children, plan, demo.recipe_of(plan), tmp_path)
    assert started == [("broker", False), ("fleet", True), ("server", True)]


def test_a_broker_that_ends_before_it_listens_is_an_error_at_once():
    with CommandProcesses(lambda name, line: None, {}) as children:
        broker = children.start("broker", "broker", "up", "--nosuchoption")
        with pytest.raises(RunError, match=r"broker ended with exit code 4: .*--nosuchoption"):
            children.wait_listening(broker, demo._free_port(), 60)


def test_a_broker_that_never_listens_is_an_error_after_the_deadline():
    with CommandProcesses(lambda name, line: None, {}) as children:
        command = children.start("broker", "simulate", "--set", "rounds=100000")
        with pytest.raises(DeadlineError, match=r"broker: port \d+ accepts no connection after 0\.1 s"):
            children.wait_listening(command, demo._free_port(), 0.1)


def test_a_taken_port_is_an_error_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        plan = DemoOptions(port=other.getsockname()[1], runs=tmp_path / "runs")
        with pytest.raises(ConnectError, match=f"port {plan.port} on 127.0.0.1: Address already in use"):
            demo.run(plan)
    assert not plan.runs.exists()


@pytest.mark.parametrize(("keep", "line"), [(True, "ready"), (False, "log {}/mosquitto.log")])
def test_the_folder_stays_if_it_was_asked_for_or_a_printed_line_names_it(tmp_path, capsys, keep, line):
    with demo._DemoFolder(DemoOptions(runs=tmp_path, keep=keep)) as folder:
        folder.print_line("broker", line.format(folder.path))
    assert folder.path.is_dir()
    assert f"kept: {folder.path}" in capsys.readouterr().err


def test_the_folder_is_removed_if_no_printed_line_names_it(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt), demo._DemoFolder(DemoOptions(runs=tmp_path)) as folder:
        folder.print_line("broker", "ready")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    assert "kept" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("on_path", "folder", "program"),
    [
        ("/usr/bin/edge-fl", "project", "edge-fl"),
        (None, "project", ".venv/bin/edge-fl"),
        (None, "elsewhere", "{}/project/.venv/bin/edge-fl"),
        (None, "broken", "edge-fl"),
    ],
)
def test_the_next_command_can_be_typed_as_printed(tmp_path, monkeypatch, on_path, folder, program):
    """As after `make demo`, whose environment is not on PATH."""
    environment = tmp_path / ("broken" if folder == "broken" else "project") / ".venv/bin"
    environment.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    if folder != "broken":
        (environment / "edge-fl").touch()
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setattr("sys.executable", str(environment / "python"))
    monkeypatch.setattr("shutil.which", lambda name: on_path)
    assert demo_command._program() == program.format(tmp_path)


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("options", "until"),
    [
        ([], ""),
        (["--secure"], ""),
        (["--keep", "--secure"], ""),
        ([], "round 1/1"),
        (["--secure"], "broker | "),
    ],
    ids=["plaintext", "mTLS", "kept", "interrupted", "interrupted early"],
)
def test_the_output_names_only_files_that_exist_and_no_refused_connection(
    slow_broker, tmp_path, options, until
):
    """The complete output of the command in a folder of its own, up to Ctrl-C after the line `until`."""
    size = ["--devices", "2", "--full", "1", "--rounds", "1", "--runs", "my/runs"]
    command = [sys.executable, "-m", "edge_fl", "demo", *size, *options]
    lines = []
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=slow_broker | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if until and until in line:
                process.send_signal(signal.SIGINT)
    output = "".join(lines)
    assert process.returncode == (130 if until else 0), output
    assert "refused" not in output and "trying again" not in output
    found = paths(output, tmp_path)
    assert [str(path) for path in found if not path.exists()] == []
    if not until:
        assert {path.name for path in found} >= {"registry.sqlite"}
