"""The demo: real commands as child processes that always end, and the gain that it proves.

The pictures of the README: `EDGE_FL_SCREENSHOTS=$PWD/docs/images python -m pytest tests/lab/test_demo.py -k plaintext`.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from html import escape
from pathlib import Path

import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.cli import App
from edge_fl.data import datasets
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, RunError
from edge_fl.fleet import simulated
from edge_fl_broker.find import Program
from edge_fl_console.dashboard.pages import overview
from edge_fl_lab import demo, demo_data
from edge_fl_lab.cli import demo as demo_command
from edge_fl_lab.demo import DemoOptions
from edge_fl_lab.report import page
from edge_fl_server.children import CommandProcesses
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry import Database, registered_devices, rollouts
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics
from tests.devices.deadly import deadly

ROOT = Path(__file__).parents[2]
PICTURES = os.environ.get("EDGE_FL_SCREENSHOTS", "")


def test_images_are_divided_into_few_labels_for_head_only_devices_and_many_for_full_ones():
    dataset = datasets.load("digits", Path())
    split = demo_data.divide(dataset, 28, 4, 3)
    full = {simulated.names(28)[number] for number in simulated.full_devices(28, 4, 3)}
    assert list(split.clients) == simulated.names(28) and len(full) == 4
    owned = np.concatenate([*split.train, *split.validation, *split.test])
    assert len(np.unique(owned)) == len(owned) == 37 * (24 + 4 * 6)
    for row, name in enumerate(split.clients):
        sizes = [len(rows[row]) for rows in (split.train, split.validation, split.test)]
        assert sizes == ([149, 17, 56] if name in full else [10, 0, 27])
    again, other = (demo_data.divide(dataset, 28, 4, seed).fingerprint() for seed in (3, 4))
    assert split.fingerprint() == again != other


def test_too_many_devices_for_the_images_are_an_error():
    dataset = datasets.load("digits", Path())
    with pytest.raises(
        ConfigError, match="1,797 images for 4 full and 196 head-only devices, expected 3,300"
    ):
        demo_data.divide(dataset, 200, 4, 0)


def test_the_run_s_report_compares_each_device_with_training_on_its_own_data_alone(tmp_path):
    """Twelve devices; the last one was never evaluated."""
    names = simulated.names(12)
    clients = {name: {metrics.PERSONAL_AFTER: 0.9, metrics.TEST_SAMPLES: 10.0} for name in names[:-1]}
    with Results.create(tmp_path, Recipe(name="demo", source="fleet")) as results:
        results.write_devices(
            [{"device": name, "tier": "head", "samples": 5, "bytes_down": 2, "bytes_up": 1} for name in names]
        )
        results.append_round(RoundMetrics(round=3, final=True, clients=clients))
    local = {name: 0.5 + n / 100 for n, name in enumerate(names)}
    assert demo.record_local_only(results.path, local)["sim-010"][metrics.LOCAL_ONLY] == pytest.approx(0.6)
    (group,) = page.report(Results.open(results.path)).groups
    (gain,) = group.gains
    assert (gain.difference.metric, gain.difference.against) == (metrics.PERSONAL_AFTER, metrics.LOCAL_ONLY)
    assert gain.n.value == 11 and gain.difference.value == pytest.approx(0.9 - 0.55)
    assert "training on the client's own data alone" in (results.path / "report.html").read_text().replace(
        "&#39;", "'"
    )
    assert Results.open(results.path).state().state == "completed"


def test_a_device_alone_is_fitted_on_its_training_images_and_measured_on_its_test_images():
    dark, bright = np.zeros((6, 1, 2, 2), np.uint8), np.full((6, 1, 2, 2), 200, np.uint8)
    train = Samples(np.concatenate([dark, bright]), np.repeat([0, 1], 6))
    turned = Samples(train.x, 1 - train.y)
    devices = {"right": ClientData(train, train, train), "turned": ClientData(train, train, turned)}
    assert demo_data.alone(devices, 2) == {"right": 1.0, "turned": 0.0}


def measured(fleet, after, local):
    return {
        metrics.FLEET: fleet,
        metrics.PERSONAL_AFTER: after,
        metrics.LOCAL_ONLY: local,
        metrics.TEST_SAMPLES: 27.0,
    }


def test_the_figures_are_paired_over_the_head_only_devices_that_measured_all_three_models():
    final = {
        "sim-000": measured(0.8, 0.9, 0.6),
        "sim-001": measured(0.9, 0.9, 0.8),
        "sim-002": {metrics.PERSONAL_AFTER: 0.1, metrics.LOCAL_ONLY: 0.9},
        "sim-003": measured(0.1, 0.1, 1.0),  # a full device
    }
    found = demo_data.figures(final, ["sim-000", "sim-001", "sim-002"])
    assert [(row["n"], row["mean"]) for row in found.rows] == [
        (2, pytest.approx(0.85)),
        (2, pytest.approx(0.9)),
        (2, pytest.approx(0.7)),
    ]
    assert found.sentence().startswith(
        "Without own labels 85.0 %, with 10 labels 90.0 %, alone 70.0 %: the fleet gains a device +20.0 points (95 % CI -"
    )
    assert found.sentence().endswith("paired, n = 2 devices with 27 test images each).")
    alone = demo_data.figures({"sim-000": measured(0.8, 0.9, 0.6)}, ["sim-000"])
    assert "(n = 1 device with 27 test images each, so no interval)" in alone.sentence()
    with pytest.raises(RunError, match="no head-only device measured"):
        demo_data.figures(final, ["sim-002"])


@pytest.mark.parametrize(("devices", "full"), [(4, 4), (4, 0), (4, 9)])
def test_there_must_be_full_and_head_only_devices(devices, full):
    with pytest.raises(ConfigError, match=f"{full} full devices of {devices}"):
        demo.prepare(DemoOptions(devices=devices, full=full))


def test_only_a_part_of_a_large_dataset_is_used(tmp_path):
    np.savez(tmp_path / "large.npz", x=np.zeros((4000, 4, 4), np.uint8), y=np.arange(4000) % 3)
    plan = demo.prepare(DemoOptions("large", tmp_path, devices=4, full=2, rounds=3, runs=tmp_path))
    assert sum(len(rows) for rows in plan.split.train) == 2 * 10 + 2 * 149
    assert (plan.recipe.rounds, plan.recipe.cohort.min_devices, plan.recipe.release.heads) == (3, 2, 2)
    assert Path(plan.recipe.data.split).parent == tmp_path


def test_fleet_and_server_get_the_same_split_and_broker(tmp_path):
    options = DemoOptions(devices=5, full=2, port=1999, settings=("seed=7",), runs=tmp_path)
    plan = demo.prepare(options)
    recipe, commands = plan.recipe, demo.commands(options, plan, tmp_path)
    pairs = list(zip(commands["fleet"][2::2], commands["fleet"][3::2], strict=True))
    fleet = dict(pairs)
    assert (fleet["--head-only"], fleet["--full"], fleet["--port"]) == ("3", "2", "1999")
    assert (fleet["--dataset"], fleet["--data-dir"]) == (recipe.data.dataset, recipe.data.data_dir)
    assert {word for name, word in pairs if name == "--set"} == {f"data.split={recipe.data.split}", "seed=7"}
    assert commands["broker"][commands["broker"].index("--port") + 1] == "1999"
    assert (tmp_path / "recipe.toml").read_text().count("1999") == 1


def test_every_command_of_the_demo_exists(tmp_path):
    from edge_fl_broker.cli import register as of_broker
    from edge_fl_devices.cli import register as of_devices
    from edge_fl_server.cli import register as of_server

    app = App()
    for register in (of_broker, of_devices, of_server):
        register(app)
    options = DemoOptions(runs=tmp_path)
    commands = demo.commands(options, demo.prepare(options), tmp_path)
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


def command(folder: Path, variables: dict[str, str], *options: str) -> subprocess.Popen[str]:
    """The demo in a folder, with stdout and stderr in one stream."""
    return subprocess.Popen(
        [sys.executable, "-m", "edge_fl", "demo", *options],
        cwd=folder,
        env=variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def variables(mosquitto_program: Program) -> dict[str, str]:
    return {**os.environ, **mosquitto_program.environment, "OMP_NUM_THREADS": "1"}


NO_BREAK = "\N{NO-BREAK SPACE}"  # several in a row stay
GAIN = re.compile(
    r"^Without own labels [\d.]+ %, with 10 labels [\d.]+ %, alone [\d.]+ %: the fleet gains a device \+[\d.]+ points"
    r" \(95 % CI \+([\d.]+) to \+[\d.]+, paired, n = 24 devices with 27 test images each\)\.$",
    re.MULTILINE,
)


def draw(lines: list[str], scheme: str) -> str:
    """Lines of a terminal as SVG, in the fonts of the reader."""
    ground, ink = {"light": ("#f6f8fa", "#1f2328"), "dark": ("#151b23", "#f0f6fc")}[scheme]
    width, height = round(8.45 * max(map(len, lines))) + 40, 20 * len(lines) + 36
    texts = "".join(
        f'<text x="20" y="{34 + 20 * n}">{escape(line.replace(" ", NO_BREAK))}</text>'
        for n, line in enumerate(lines)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f'<rect width="100%" height="100%" rx="8" fill="{ground}"/><g fill="{ink}"'
        f' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="14">{texts}</g></svg>\n'
    )


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "secure", [pytest.param(False, marks=pytest.mark.nightly, id="plaintext"), pytest.param(True, id="mTLS")]
)
def test_the_demo_proves_the_gain_stops_a_bad_release_and_predicts_offline(variables, tmp_path, secure):
    """As it is, with its output at 80 columns; the picture of the README is the end of the one in plaintext."""
    with command(tmp_path, variables, *["--secure"] * secure) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    progress, end = (part.splitlines() for part in output.split("\n\n", 1))
    assert len(progress) <= 25
    assert [line for line in progress if len(line) > 80] == []
    assert float(GAIN.search(output)[1]) > 0
    assert re.search(r"^gate    \|   \w+: accuracy changed by -[\d.]+ points", output, re.MULTILINE)
    assert "24 of 24 head-only devices serve release 1\n" in output
    right, images = re.search(r"still predicts: (\d+) of its (\d+) test images right", output).groups()
    assert int(images) == 27 and int(right) > 20
    assert not re.search("refused|warn|error|fail|trying again", output, re.IGNORECASE)
    run, split = sorted((tmp_path / "runs").iterdir())
    assert run.name.startswith("demo-") and split.name == "split-of-demo-digits-28-4-seed-0.csv"
    assert Results.open(run).state().state == "completed"
    curve = [line.metrics[metrics.GLOBAL_TEST] for line in Results.open(run).rounds() if not line.final]
    assert [found.clients for found in curve] == [4] * 5 and curve[-1].mean > curve[0].mean + 0.1
    with closing(Database.existing(str(run / demo.REGISTRY))) as db:
        shown = overview.read(db, "main")
        assert shown.full.heads.found.n == 24 and shown.full.heads.found.low > 0
        assert shown.served == 1 and rollouts.listed(db, "main")[0].state == "aborted"
        assert {row.device for row in registered_devices.listed(db, "main")} == set(simulated.names(28))
    if PICTURES and not secure:
        last = next(n for n, line in enumerate(progress) if line.startswith("gate"))
        shown_lines = [
            *progress[last:],
            "",
            *(part for line in end for part in textwrap.wrap(line, 80) or [""]),
        ]
        shown_lines = shown_lines[
            : next(n for n, line in enumerate(shown_lines) if line.startswith("Duration"))
        ]
        for scheme in ("light", "dark"):
            (Path(PICTURES) / f"demo-{scheme}.svg").write_text(draw(shown_lines, scheme))


@pytest.mark.broker
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
def test_the_gain_is_proved_with_every_seed(variables, tmp_path, seed):
    with command(tmp_path, variables, "--set", f"seed={seed}") as process:
        output, _ = process.communicate()
    assert process.returncode == 0 and float(GAIN.search(output)[1]) > 0, output


def test_the_picture_of_the_readme_is_the_end_of_the_demo():
    """The figures in it are of a run; its words are those of the program."""
    for scheme in ("light", "dark"):
        texts = re.findall(
            r"<text[^>]*>([^<]*)</text>", (ROOT / f"docs/images/demo-{scheme}.svg").read_text()
        )
        texts = [text.replace(NO_BREAK, " ") for text in texts]
        said = " ".join(texts)
        assert GAIN.search(re.sub(r" +", " ", said[said.index("Without") :]).strip())
        assert [line for model in demo_data.MODELS.values() for line in texts if line.startswith(model)]
        assert "gate    |" in said and "still predicts" in said


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
def slow_broker(variables: dict[str, str], mosquitto_program: Program, tmp_path: Path) -> dict[str, str]:
    """Variables with which mosquitto needs longer to listen than a fleet needs to start."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mosquitto").write_text(
        f'#!/bin/sh\n[ "$1" = -h ] || sleep 5\nexec {shlex.quote(str(mosquitto_program.path))} "$@"\n'
    )
    (folder / "mosquitto").chmod(0o755)
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

    plan = DemoOptions(devices=2, full=1, port=port, runs=tmp_path)
    with Recorded(lambda name, line: None, slow_broker) as children:
        demo._start(children, plan, demo.prepare(plan), tmp_path)
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
        pytest.param([], "", marks=pytest.mark.nightly, id="plaintext"),
        pytest.param(["--secure"], "", marks=pytest.mark.nightly, id="mTLS"),
        pytest.param(["--keep", "--secure"], "", id="kept"),
        pytest.param([], "round 1/1", id="interrupted"),
        pytest.param(["--secure"], "broker  | ", id="interrupted early"),
    ],
)
def test_the_output_names_only_files_that_exist_and_no_refused_connection(
    slow_broker, tmp_path, options, until
):
    """The complete output of the command in a folder of its own, up to Ctrl-C after the line `until`."""
    size = ["--devices", "2", "--full", "1", "--rounds", "1", "--runs", "my/runs"]
    lines = []
    with command(tmp_path, slow_broker, *size, *options) as process:
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
