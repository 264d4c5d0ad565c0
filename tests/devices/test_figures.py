"""Memory and disk usage of an agent, measured live with a small network and printed; the bounds are C1 and C2 of docs/performance.md.

pytest tests/devices/test_figures.py -s
"""

import re
import resource
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edge_fl.blob import describe
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, canary_input
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.scripted import TOPICS, ScriptedServer

INPUT = InputSpec((3, 32, 32))
DIM = 512
MEGABYTE = 1024 * 1024
AGENT = """
import sys
sys.modules.update(dict.fromkeys(ABSENT))  # as if they were not installed
HEAVY = ("torch", "sklearn", "scipy", "onnx", "onnxruntime", "PIL", "installer", "packaging")
from edge_fl.cli import main
code = main(sys.argv[1:])
print([name for name in HEAVY if sys.modules.get(name)])
sys.exit(code)
"""
SERVING = """
import sys
import numpy as np
from edge_fl_devices.serving.predict import Predictor
predictor = Predictor(sys.argv[1])
predictor.predict(np.zeros((8, 3, 32, 32), np.uint8))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
print([name for name in ("torch", "sklearn", "scipy", "onnx") if name in sys.modules])
"""


def small_network() -> bytes:
    """Two convolutions and a layer of 512 features, 3 MB: the small CNN of docs/performance.md."""
    rng = np.random.default_rng(0)
    shapes = {"k1": (32, 3, 5, 5), "k2": (64, 32, 5, 5), "w": (1600, DIM)}
    weights = [
        graphs.constant(name, rng.normal(size=shape).astype(np.float32) / np.sqrt(np.prod(shape[1:])))
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["image", "k1"], ["c1"]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "k2"], ["c2"]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("MaxPool", ["r2"], ["p2"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p2"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["features"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", *INPUT.shape])
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", DIM])
    model = helper.make_model(
        helper.make_graph(nodes, "small", [image], [features], weights),
        opset_imports=[helper.make_opsetid("", graphs.OPSET)],
        ir_version=graphs.IR,
    )
    return model.SerializeToString()


def manifest_of(payload: bytes) -> Manifest:
    question = Canary(seed=5, images=2, features=[])
    session = onnxruntime.InferenceSession(payload, providers=["CPUExecutionProvider"])
    found = session.run(None, {"image": canary_input(question, INPUT)})[0]
    canary = Canary(5, 2, [[float(value) for value in row[:16]] for row in found], tolerance=1e-3)
    return graphs.manifest_for(
        payload,
        extractor=describe(payload),  # in chunks as a server makes them
        input=INPUT,
        feature_dim=DIM,
        classes=[str(c) for c in range(10)],
        canary=canary,
    )


class Scales:
    """Measures the memory of a process and its children many times a second."""

    def __init__(self, pid: int) -> None:
        self._pid, self.peak, self._stop = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> int:
        """Resident bytes of the process and its children together; pages that they share count twice."""
        return sum(resident(pid) for pid in (self._pid, *children(self._pid)))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.now())


def resident(pid: int) -> int:
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:
            continue
    return found


def base() -> dict[str, metadata.Distribution]:
    """What `pip install edge-fl` brings, by name; this project among it."""
    todo, found = ["edge-fl"], dict[str, metadata.Distribution]()
    while todo:
        name = todo.pop()
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        for line in found[name].requires or []:
            needed = re.match(r"[\w.-]+", line)
            if needed and "extra ==" not in line and (key := _key(needed[0])) not in found:
                todo.append(key)
    return found


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def base_bytes() -> int:
    """Size on disk of what `pip install edge-fl` brings, without this project itself."""
    total = 0
    for name, distribution in base().items():
        if name != "edge-fl":
            files = (Path(str(file.locate())) for file in distribution.files or [])
            total += sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc")
    return total


def absent() -> list[str]:
    """The packages of this environment that no device has: libraries import some of them where they are installed, and weigh more."""
    on_device = base().keys()
    owners = metadata.packages_distributions().items()
    return sorted(name for name, by in owners if not {_key(one) for one in by} & on_device)


def processor_s(command: list[str], times: int = 3) -> float:
    """Processor seconds of a command, start included: the minimum of several runs, which other load hardly affects."""
    taken = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.broker
def test_an_agent_stays_small_between_fits_and_within_bounds_at_their_peak(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(1)
    y = np.arange(200) % 10
    x = (rng.integers(0, 120, (200, *INPUT.shape)) + 13 * y[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=x, y=y)
    payload = small_network()
    manifest, home = manifest_of(payload), tmp_path / "pi"
    server = ScriptedServer(partial(MqttTransport, mosquitto.endpoint, session_expiry_s=0), "figures-server")
    server.online()
    server.release(Repository(tmp_path / "server"), manifest, payload)
    broker = [
        "--host",
        mosquitto.endpoint.host,
        "--port",
        str(mosquitto.endpoint.port),
        "--fleet",
        TOPICS.fleet,
    ]
    what = [
        "--id",
        "pi-weighed",
        "--data",
        str(tmp_path / "images.npz"),
        "--dir",
        str(home),
        "--tier",
        "head",
    ]
    program = AGENT.replace("ABSENT", repr(absent()))
    command = [sys.executable, "-c", program, "device", "run", *what, *broker]
    started_s = time.monotonic()
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    scales = Scales(agent.pid)
    try:
        server.wait_for("pi-weighed", "state", lambda s: s.status == "ready")
        idle = resident(agent.pid)
        server.assignment("pi-weighed", "serve", run_id="toy", round=1, id="rel-1", release=1)
        report = server.wait_for("pi-weighed", "rpt")
        reported_s = time.monotonic() - started_s
        server.ack("pi-weighed", "rel-1")
        server.wait_for("pi-weighed", "state", lambda s: s.activity == "idle" and s.release == 1)
        between = resident(agent.pid)
    finally:
        scales.stop()
        agent.terminate()
        heavy = agent.communicate(timeout=60)[0].strip()
    assert not report.error and report.head == "logistic"
    assert heavy == "[]", "the idle agent holds what only its children or an update need"

    loads = [sys.executable, "-c", "import numpy, onnxruntime"]
    predict = [sys.executable, "-m", "edge_fl", "device", "predict", str(tmp_path / "images.npz")]
    imports_s, predict_s = processor_s(loads), processor_s([*predict, "--dir", str(home)])
    serving = subprocess.run(
        [sys.executable, "-c", SERVING, str(home)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    up = {
        kind: [p for a, p in server.received if (a.device, a.kind) == ("pi-weighed", kind)]
        for kind in ("rpt", "state", "meta")
    }
    metadata_bytes = sum(len(content) for _, content in Repository(tmp_path / "server").files())
    server.leave()

    figures = {
        "agent, before the first release, MB": idle / MEGABYTE,
        "agent, between fits, MB": between / MEGABYTE,
        "agent and children, peak of install and fit, MB": scales.peak / MEGABYTE,
        "process that serves the model, MB": int(serving[0]) / 1024,
        "start to first report, s": reported_s,
        "predict 200 images from exec, processor s": predict_s,
        "of which: importing numpy and onnxruntime, s": imports_s,
        "installed base, MB": base_bytes() / MEGABYTE,
        "a release down, bytes": report.bytes_down,
        "signed metadata that the broker keeps, bytes": metadata_bytes,
        "its report up, bytes": len(up["rpt"][0]),
        "status and capability up, bytes": sum(map(len, up["state"] + up["meta"])),
    }
    with capsys.disabled():
        sys.stdout.write("\nfigures of one head-only agent (small CNN, 200 images, logistic head)\n")
        for name, value in figures.items():
            shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            sys.stdout.write(f"  {name:50s} {shown:>12s}\n")
    assert between <= 75 * MEGABYTE and idle <= 75 * MEGABYTE  # C1, not serving
    assert int(serving[0]) <= 90 * 1024 and serving[1] == "[]"  # C1, with a model loaded
    assert scales.peak <= 250 * MEGABYTE  # C2
    assert base_bytes() <= 430 * MEGABYTE  # C2
    assert report.bytes_down <= 1.01 * len(payload)
