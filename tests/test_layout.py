"""The rules of the house that a linter cannot see: what a device may import, where things stand, and which words stand once."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import broker
import devices
import edge_fl
import server
from edge_fl.methods import METHODS

ROOT = Path(edge_fl.__file__).parents[1]
PACKAGES = (edge_fl, broker, devices, server)
SOURCES = sorted(path for package in PACKAGES for path in Path(str(package.__file__)).parent.rglob("*.py"))
TORCH_LIVES_IN = ("edge_fl.learn", "edge_fl.models", "edge_fl.methods", "devices.workers.full")
ONNX_LIVES_IN = ("devices.serving.fused",)  # below the server; `edge_fl[server]` brings it
LARGEST_FILE_LINES = 400
LARGEST_METHOD_LINES = 150

# A child that imports the modules named in its arguments, where what a Raspberry Pi lacks cannot be imported.
HEAD_ONLY = """
import importlib, sys

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "onnx", "onnxscript", "server"}:
            raise ModuleNotFoundError(f"{name} is banned on a head-only device", name=name)

sys.meta_path.insert(0, Ban())
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed += 1
        print(f"{name}: {type(error).__name__}: {error}")
sys.exit(failed != 0)
"""


def modules(package: str) -> Iterator[str]:
    """The package and all modules below it, found without importing any of them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    yield package
    yield from _below(package, list(spec.submodule_search_locations))


def _below(package: str, folders: list[str]) -> Iterator[str]:
    for module in pkgutil.iter_modules(folders, package + "."):
        yield module.name
        if module.ispkg:
            yield from _below(
                module.name, [f"{folder}/{module.name.rpartition('.')[2]}" for folder in folders]
            )


def needs_more(module: str) -> bool:
    return any(module == home or module.startswith(home + ".") for home in (*TORCH_LIVES_IN, *ONNX_LIVES_IN))


def import_head_only(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD_ONLY, *names], capture_output=True, text=True, timeout=100
    )


def test_the_head_only_path_needs_neither_torch_nor_onnx_nor_the_server() -> None:
    names = [
        name
        for package in ("edge_fl", "broker", "devices")
        for name in modules(package)
        if not needs_more(name)
    ]
    assert {"edge_fl.wire.messages", "edge_fl.cli", "broker", "devices"} <= set(names)
    child = import_head_only(*names)
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("name", ["edge_fl.learn.tree", "server"])
def test_the_ban_works(name: str) -> None:
    child = import_head_only("edge_fl.errors", name)
    assert child.returncode == 1
    assert child.stdout.startswith(f"{name}: ModuleNotFoundError: ")


def test_the_four_packages_stand_side_by_side() -> None:
    for package in PACKAGES:
        assert Path(str(package.__file__)) == ROOT / package.__name__ / "__init__.py"


def test_torch_lives_where_the_import_contract_says() -> None:
    # lint-imports checks the rule; this checks that the test above and the contract speak of the same modules.
    contract = (ROOT / "pyproject.toml").read_text()
    homes = set(re.findall(r'"([\w.]+)(?:\.\*\*)? -> torch"', contract))
    assert homes == set(TORCH_LIVES_IN)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string in the code, f-strings' pieces included, docstrings not."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    ("text", "home"),
    [
        (r"^efl/|/dn/|/up/|^enroll/|^srv/state$", "edge_fl/wire/topics.py"),
        (r"^application/", "edge_fl/wire/transport.py"),
    ],
)
def test_a_word_of_the_wire_is_written_in_one_module(text: str, home: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {string!r}"
        for path in SOURCES
        if path != ROOT / home
        for line, string in strings(ast.parse(path.read_text()))
        if re.search(text, string)
    ]
    assert not found, "\n".join(found)


def test_the_search_for_words_finds_the_topics() -> None:
    topics = ast.parse((ROOT / "edge_fl/wire/topics.py").read_text())
    assert any(re.search(r"/dn/|/up/", text) for _, text in strings(topics))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no docstring that a newcomer could quote"
    assert len(text.splitlines()) <= LARGEST_FILE_LINES


METHOD_FILES = sorted({Path(str(sys.modules[method.__module__].__file__)) for method in METHODS.values()})


@pytest.mark.parametrize("path", METHOD_FILES, ids=lambda path: path.stem)
def test_a_method_is_short_and_stands_alone(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LARGEST_METHOD_LINES
    others = {f"edge_fl.methods.{other.stem}" for other in METHOD_FILES} - {f"edge_fl.methods.{path.stem}"}
    nodes = ast.walk(ast.parse(path.read_text()))
    assert not others & {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_one_batch_loop_is_in_fit() -> None:
    looping = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if "bench" not in str(path)  # the plain loop that the engines are measured against
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.For | ast.comprehension)
        and re.search(r"\.batches\(\w*stage", ast.unparse(node.iter))
    }
    assert looping == {"edge_fl/learn/fit.py"}


def test_constraints_pin_every_direct_dependency_and_hold_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements} - {"edge-fl"}  # type: ignore[index]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9.]*", line) for line in lines)
    assert {line.partition("==")[0] for line in lines} == names
