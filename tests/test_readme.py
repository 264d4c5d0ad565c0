"""The examples of README and docs/your-own.md work as printed, in an installed package with the printed entry points."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from edge_fl.methods import FINE_TUNED, METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
YOUR_OWN = (ROOT / "docs/your-own.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
MOST_LINES = 130
EDGE_FL = [sys.executable, "-m", "edge_fl"]
DURATION = re.compile(
    r"\b(?:about |under )?(?:half )?(?:an?|one|two|three|five|ten|\d+) (?:minutes?|seconds?|s)\b"
)
"""Such as "under a minute", "two minutes", "30 s"."""
DEMO_TIME = "under a minute"
SMALL = ["--dataset", "digits", "--rounds", "1", "--clients", "3", "--set", "method.epochs=1"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


EXAMPLES = [*blocks(README, "python"), *blocks(YOUR_OWN, "python")]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package: the examples' modules and the entry points of the printed pyproject.toml."""
    folder = tmp_path_factory.mktemp("package")
    for code in EXAMPLES:
        (folder / code.split()[1]).write_text(code)  # "# gentle.py"
    (pyproject,) = blocks(YOUR_OWN, "toml")
    groups = tomllib.loads(pyproject)["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items()]
    info = folder / "example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TORCH_HOME": str(package / "torch"),
    }
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=120)


def source_tree() -> list[Path]:
    """Every file and folder named in the complete source tree: an entry per line, with the files it contains behind its name."""
    block = ARCHITECTURE.partition("## The source tree\n\n```\n")[2].partition("```")[0]
    found, folders = [], []
    for line in block.splitlines():
        if entry := re.match(r"( {0,6})([\w/]+)/", line):
            folders = [*folders[: len(entry[1]) // 2], entry[2]]
            found.append(Path(*folders))
        elif re.match(r"  \w+\.py", line):
            folders = folders[:1]
        found += [Path(*folders, name) for name in re.findall(r"\b[\w.]+\.(?:py|sh|toml|md|j2)\b", line)]
    return found


def test_source_tree_names_existing_files() -> None:
    entries = source_tree()
    assert Path("edge_fl/wire/mqtt/loop.py") in entries
    assert not [str(entry) for entry in entries if not (ROOT / entry).exists()]


def test_source_tree_names_every_package_of_the_product() -> None:
    packages = Path("edge_fl"), Path("broker"), Path("devices"), Path("server")
    folders = {
        file.parent.relative_to(ROOT) for top in packages for file in (ROOT / top).rglob("__init__.py")
    }
    folders.discard(Path("server/edge_fl_server/registry/migrations/versions"))  # named behind its folder
    assert len(folders) > 60
    assert folders <= set(source_tree()), sorted(map(str, folders - set(source_tree())))


def test_readmes_source_tree_has_the_folders_of_the_repository() -> None:
    block = README.partition("## The source tree\n\n```\n")[2].partition("```")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    folders = {name for name in project["targets"]["sdist"]["include"] if (ROOT / name).is_dir()}
    assert {line.split("/")[0] for line in block.splitlines()} == folders


def test_readme_and_changelog_count_the_methods() -> None:
    listed = [*METHODS, *FINE_TUNED]
    for text in (README, (ROOT / "CHANGELOG.md").read_text()):
        assert re.findall(r"\b(\d+) methods\b(?! are| of)", text)[:1] == [str(len(listed))]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def on_the_demo() -> dict[str, str]:
    """Every text that states how long the demo takes."""
    names = ("docs/README.md", "docs/quick-start.md", "docs/security.md", "server/edge_fl_lab/cli/demo.py")
    pages = {name: (ROOT / name).read_text() for name in names}
    pages["docs/security.md"] = (
        pages["docs/security.md"].partition("`make demo-secure`")[2].partition(". ")[0]
    )
    (target,) = re.findall(r"^demo: .*", (ROOT / "Makefile").read_text(), re.MULTILINE)
    start = README.partition("## Install")[2].partition("## Python")[0]
    return (
        {"README.md": start.replace("once: three minutes on a fast line", "")} | pages | {"Makefile": target}
    )


@pytest.mark.parametrize("text", on_the_demo().values(), ids=[*on_the_demo()])
def test_every_text_on_the_demo_states_the_same_time(text: str) -> None:
    assert set(DURATION.findall(" ".join(text.split()))) == {DEMO_TIME}


def test_other_times_are_found() -> None:
    text = "in about a minute, in two minutes, in under two minutes, 30 s, under a minute"
    assert DURATION.findall(text) == [
        "about a minute",
        "two minutes",
        "under two minutes",
        "30 s",
        DEMO_TIME,
    ]


def test_readme_and_quick_start_state_the_same_download() -> None:
    pages = (README, (ROOT / "docs/quick-start.md").read_text())
    assert [re.findall(r"downloads about [\d.]+ GB of wheels", page) for page in pages] == [
        ["downloads about 3.5 GB of wheels"]
    ] * 2


def test_the_first_screen_has_both_ways_to_begin() -> None:
    first = "\n".join(README.splitlines()[:30])
    assert {"make demo", "make test", "pip install '.[server]'"} <= set(
        re.findall(r"^(make demo|make test|pip install '\.\[server\]')", first, re.MULTILINE)
    )
    assert "sudo apt install git make python3-venv mosquitto" in first


def test_readmes_example_prints_an_accuracy_per_client(package: Path) -> None:
    (code,) = blocks(README, "python")
    assert len(code.replace("\n\n", "\n").splitlines()) <= 7
    done = run(package, sys.executable, code.split()[1])
    assert done.returncode == 0, done.stderr
    values = [float(number) for number in re.findall(r"[\d.]+", done.stdout)]
    assert len(values) == 10 and 0.5 < sum(values) / 10 <= 1


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split()[1])
def test_every_example_is_shorter_than_20_lines(code: str) -> None:
    assert sum(bool(line.strip()) for line in code.splitlines()) < 20


def test_user_extractor_trains(package: Path) -> None:
    model = ["--model", "mine:Wide", "--set", "model.options.width=8"]
    done = run(package, *EDGE_FL, "simulate", "--method", "fedrep", *SMALL, *model)
    assert done.returncode == 0, done.stderr


def test_user_method_trains_and_its_hyper_parameters_are_checked(package: Path) -> None:
    done = run(package, *EDGE_FL, "simulate", "--method", "gentle", *SMALL)
    assert done.returncode == 0, done.stderr
    wrong = [*EDGE_FL, "simulate", "--method", "gentle", *SMALL, "--set", "method.options.step=2"]
    done = run(package, *wrong)
    assert done.returncode == 4
    assert "step = 2, expected 0 to 1" in done.stderr


def test_user_method_needs_no_registration_and_a_script_may_hold_it(package: Path) -> None:
    done = run(package, *EDGE_FL, "simulate", "--method", "gentle:Gentle:step=0.2", *SMALL)
    assert done.returncode == 0, done.stderr
    done = run(package, sys.executable, "head_first.py")
    assert done.returncode == 0 and "'method': '__main__:HeadFirst'" in done.stdout, done.stderr


def test_missing_imagenet_weights_are_named_with_their_folder(package: Path) -> None:
    done = run(package, *EDGE_FL, "simulate", *SMALL, "--model", "torchvision:resnet18")
    assert done.returncode == 4
    place = package / "torch" / "hub" / "checkpoints"
    assert re.search(
        rf"resnet18-\w+\.pth not found; expected torchvision's \S+ as {place}/resnet18", done.stderr
    )


HEAD = """
import numpy as np
from edge_fl_devices.config import convert
from edge_fl import heads
from edge_fl.data import datasets

digits = datasets.load("digits", None).samples
z = digits.x.reshape(len(digits), -1).astype(np.float32) / 255
kind = convert({"id": "pi-01", "data": "digits", "head": "discriminant"}, "device.toml").head
head = heads.fit(kind, z[:600], digits.y[:600], 10, unit_norm=False, extractor="ab" * 32)
again = heads.from_arrays(head.to_arrays(), head.describe())
print(type(again).__name__, (again.predict(z[600:]) == digits.y[600:]).mean())
"""


def test_user_head_is_found_by_a_device_and_survives_storage(package: Path) -> None:
    done = run(package, sys.executable, "-c", HEAD)
    assert done.returncode == 0, done.stderr
    name, accuracy = done.stdout.split()
    assert name == "Discriminant"
    assert float(accuracy) > 0.85
