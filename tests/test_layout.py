"""Rules for the source tree: imports of head-only devices, layers, and strings that are defined in one module."""

import ast
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any

import grimp
import pytest

import edge_fl
import edge_fl_broker
import edge_fl_console
import edge_fl_devices
import edge_fl_lab
import edge_fl_maker
import edge_fl_server
from edge_fl.methods import METHODS
from tests import path_rule

ROOT = Path(edge_fl.__file__).parents[1]
CORE = (edge_fl, edge_fl_broker, edge_fl_devices, edge_fl_server)
EXTENSIONS = {edge_fl_maker: "devices", edge_fl_lab: "server", edge_fl_console: "server"}
PACKAGES = (*CORE, *EXTENSIONS)
SOURCES = sorted(path for package in PACKAGES for path in Path(str(package.__file__)).parent.rglob("*.py"))
TORCH_LIVES_IN = ("edge_fl.learn", "edge_fl.models", "edge_fl.methods", "edge_fl_devices.workers.full")
ONNX_LIVES_IN = ("edge_fl_maker.fused",)  # below the server; `edge_fl[server]` brings it

CIRCLE, DOWNWARDS = "no package or module imports in a circle", ": packages import downwards only"
PLANTED_IMPORTS = [
    ("the core imports no extension", "edge_fl/plugins.py", "edge_fl_lab.catalogue"),
    ("the core imports no extension", "server/edge_fl_server/services.py", "edge_fl_console.services"),
    ("the server's extensions import its side", "server/edge_fl_lab/demo.py", "edge_fl_devices.config"),
    ("the makers' extension imports its side", "devices/edge_fl_maker/access.py", "edge_fl_server.services"),
    ("broker, devices and server do not", "broker/edge_fl_broker/child.py", "edge_fl_server.children"),
    ("torch, timm, peft and onnx are", "devices/edge_fl_devices/board/health.py", "torch"),
    (CIRCLE, "edge_fl/modalities/limits.py", "edge_fl.modalities.pictures"),
    (CIRCLE, "broker/edge_fl_broker/config.py", "edge_fl_broker.mosquitto"),
    (CIRCLE, "devices/edge_fl_devices/agent/state.py", "edge_fl_devices.agent.step"),
    (CIRCLE, "server/edge_fl_server/mqtt/journal.py", "edge_fl_server.mqtt.devices.roster"),
    (f"edge_fl{DOWNWARDS}", "edge_fl/release/manifests.py", "edge_fl.wire.messages"),
    (f"server{DOWNWARDS}", "server/edge_fl_server/registry/registered_devices.py", "edge_fl_server.cli"),
    (f"devices{DOWNWARDS}", "devices/edge_fl_devices/agent/step.py", "edge_fl_devices.runtime"),
    (f"maker{DOWNWARDS}", "devices/edge_fl_maker/watch.py", "edge_fl_maker.cli"),
    (f"lab{DOWNWARDS}", "server/edge_fl_lab/catalogue.py", "edge_fl_lab.cli"),
    (f"console{DOWNWARDS}", "server/edge_fl_console/tokens.py", "edge_fl_console.cli"),
]
"""Contract of pyproject.toml, by how its name begins; a module; and an import in it that the contract forbids."""

# Imports the modules named in its arguments while packages, given first, cannot be imported.
BLOCKED = """
import importlib, sys

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"{name} is banned here", name=name)

sys.meta_path.insert(0, Ban())
failed = 0
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed += 1
        print(f"{name}: {type(error).__name__}: {error}")
sys.exit(failed != 0)
"""


def modules(package: str) -> Iterator[str]:
    """The package and all modules below it, without importing them."""
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


def import_without(blocked: str, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, blocked, *names], capture_output=True, text=True, timeout=100
    )


HEAD_ONLY = "torch,torchvision,onnx,onnxscript,edge_fl_server,edge_fl_lab,edge_fl_console"


def test_head_only_code_needs_neither_torch_nor_onnx_nor_the_server() -> None:
    names = [
        name
        for package in ("edge_fl", "edge_fl_broker", "edge_fl_devices", "edge_fl_maker")
        for name in modules(package)
        if not needs_more(name)
    ]
    assert {"edge_fl.wire.messages", "edge_fl.cli", "edge_fl_broker", "edge_fl_devices"} <= set(names)
    child = import_without(HEAD_ONLY, *names)
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_core_imports_no_extension() -> None:
    # `make core` runs the whole tests of the core like this (tests/without_extensions.py)
    alembic_script = "edge_fl_server.registry.migrations.env"
    names = [name for package in CORE for name in modules(package.__name__) if name != alembic_script]
    child = import_without(",".join(package.__name__ for package in EXTENSIONS), *names)
    assert child.returncode == 0, child.stdout + child.stderr


def test_tests_of_the_core_import_no_extension() -> None:
    blocked = re.compile(
        rf"^\s*(?:from|import) (?:{'|'.join(e.__name__ for e in EXTENSIONS)})\b", re.MULTILINE
    )
    folders = [ROOT / "tests" / name for name in ("edge_fl", "broker", "devices", "server")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 100
    assert not [str(file.relative_to(ROOT)) for file in files if blocked.search(file.read_text())]


@pytest.mark.parametrize("name", ["edge_fl.learn.tree", "edge_fl_server"])
def test_blocked_packages_cannot_be_imported(name: str) -> None:
    child = import_without(HEAD_ONLY, "edge_fl.errors", name)
    assert child.returncode == 1
    assert child.stdout.startswith(f"{name}: ModuleNotFoundError: ")


def test_no_import_package_has_a_name_that_a_user_may_have_chosen() -> None:
    for package in PACKAGES:
        folder = EXTENSIONS.get(package) or package.__name__.removeprefix("edge_fl_")
        home = ROOT if package is edge_fl else ROOT / folder
        assert Path(str(package.__file__)) == home / package.__name__ / "__init__.py"
        assert not (home / "__init__.py").exists()


def test_torch_modules_are_those_of_the_import_contract() -> None:
    # lint-imports checks the rule; this checks that the test above covers the same modules.
    contract = (ROOT / "pyproject.toml").read_text()
    homes = set(re.findall(r'"([\w.]+)(?:\.\*\*)? -> torch"', contract))
    assert homes == set(TORCH_LIVES_IN)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of pyproject.toml and of the packages."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        source = Path(str(package.__file__)).parent
        target = folder / source.relative_to(ROOT)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_every_import_contract_is_kept_and_has_a_planted_violation(copied: Path) -> None:
    unchanged = lint_imports(copied)
    assert unchanged.returncode == 0, unchanged.stdout
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in settings["tool"]["importlinter"]["contracts"]:
        assert any(contract["name"].startswith(name) for name, _, _ in PLANTED_IMPORTS), contract["name"]


@pytest.mark.parametrize(
    ("contract", "path", "module"), PLANTED_IMPORTS, ids=lambda text: text if "/" in text else ""
)
def test_a_planted_import_breaks_its_contract(copied: Path, contract: str, path: str, module: str) -> None:
    text = (copied / path).read_text()
    (copied / path).write_text(f"{text}\nimport {module}\n")
    broken = lint_imports(copied)
    (copied / path).write_text(text)
    assert broken.returncode == 1
    assert re.search(rf"^{re.escape(contract)}.* BROKEN", broken.stdout, re.MULTILINE), broken.stdout


def imports_in_order(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules, each behind all that it imports. Raises CycleError, which names a circle."""
    return list(TopologicalSorter(imports).static_order())


def test_no_module_imports_in_a_circle_not_even_with_its_own_package() -> None:
    # the contract compares siblings, not a module with the package that it lies in
    graph = grimp.build_graph(*(package.__name__ for package in PACKAGES), cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports_in_order(imports)
    planted = {**imports, "edge_fl.heads.linear": {*imports["edge_fl.heads.linear"], "edge_fl.heads"}}
    with pytest.raises(CycleError, match=r"edge_fl\.heads"):
        imports_in_order(planted)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder / name) for name in ("", "broker", "devices", "server")),
        "COLUMNS": "400",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string in the code, including parts of f-strings, without docstrings."""
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
def test_protocol_strings_are_defined_in_one_module(text: str, home: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {string!r}"
        for path in SOURCES
        if path != ROOT / home
        for line, string in strings(ast.parse(path.read_text()))
        if re.search(text, string)
    ]
    assert not found, "\n".join(found)


def test_the_search_for_strings_finds_the_topics() -> None:
    topics = ast.parse((ROOT / "edge_fl/wire/topics.py").read_text())
    assert any(re.search(r"/dn/|/up/", text) for _, text in strings(topics))


def test_toml_is_parsed_in_one_module() -> None:
    # Text comes from `edge_fl.files.user_text`, which knows the encodings of editors.
    found = {str(path.relative_to(ROOT)) for path in SOURCES if "tomllib" in path.read_text()}
    assert found == {"edge_fl/toml.py"}


def test_no_path_is_formatted_without_the_one_function() -> None:
    # Names of files are bytes; the launcher imports only Python, and writes to stderr, which escapes them.
    found = [
        f"{path.relative_to(ROOT)}:{finding.line}: {finding.how}: {ast.unparse(finding.node)}"
        for path, finding in path_rule.in_files(SOURCES)
        if path.name != "launcher.py"
    ]
    expected = "expected edge_fl.files.paths.text for people, os.fspath for the system"
    assert not found, "\n".join([*found, expected])


PLANTED = """
import logging
from pathlib import Path
log = logging.getLogger()
class Store:
    folder: Path
    def __init__(self, file: Path) -> None:
        self._file = file
    def bad(self, given: Path | None, many: list[Path]) -> None:
        raise OSError(f"{given}: missing")                      # 1
        raise OSError(f"{self._file.parent.name!r}")            # 2
        here = self.folder / "x"
        log.warning("%s: gone", here)                           # 3
        print(here.stem)                                        # 4
        "%s" % here                                             # 5
        here.name.encode()                                      # 6
        [f"{each}" for each in many if each]                    # 7
        ", ".join(map(str, many))                               # 8
        for found in sorted(here.glob("*")):
            str(found)                                          # 9
        if (last := made(1)):
            f"{last.suffix}"                                    # 10
        f"{self._file}"                                         # 11
    def good(self, path: Path, count: int, name: str) -> None:
        f"{text(path)}: {count} {name} {path.stat().st_size}"
        path.with_name(f"{path.name}.part")
        self.folder / f"{path.stem}-{count}.npz"
        path.write_text(f"{count / 2}")
        for path in (1, 2):
            f"{path}"
def made(count: int) -> Path: ...
"""


def test_the_search_for_formatted_paths_finds_planted_ones_and_nothing_else() -> None:
    tree = ast.parse(PLANTED)
    found = path_rule.findings(tree, path_rule.known([tree]))
    marked = [number for number, line in enumerate(PLANTED.splitlines(), 1) if "  # " in line]
    assert sorted(finding.line for finding in found) == marked and len(marked) == 11


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


METHOD_FILES = sorted({Path(str(sys.modules[method.__module__].__file__)) for method in METHODS.values()})


@pytest.mark.parametrize("path", METHOD_FILES, ids=lambda path: path.stem)
def test_method_imports_no_other_method(path: Path) -> None:
    others = {f"edge_fl.methods.{other.stem}" for other in METHOD_FILES} - {f"edge_fl.methods.{path.stem}"}
    nodes = ast.walk(ast.parse(path.read_text()))
    assert not others & {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_the_only_batch_loop_is_in_fit() -> None:
    looping = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.For | ast.comprehension)
        and re.search(r"\.batches\(\w*stage", ast.unparse(node.iter))
    }
    assert looping == {"edge_fl/learn/fit.py"}


def test_device_files_are_made_with_the_owner_of_their_folder() -> None:
    """So that a command of root leaves nothing that the agent's account cannot use (edge_fl/files/shared.py)."""
    makes = re.compile(
        r"\.(mkdir|touch|write_text|write_bytes)\(|makedirs\(|O_CREAT|\bopen\([^)]*\"[wax]b?\""
    )
    others = {
        "flash": "writes cards of other machines",
        "simulated": "has folders of its own",
        "agent_update/launcher.py": "runs as the agent; imports only Python",
        "agent_update/environment.py": "runs in the agent",
        "doctor/folder_probe.py": "runs as the agent; imports only Python",
        "features/feature_rows.py": "appends to a file made with open_private",
    }
    devices = Path(str(edge_fl_devices.__file__)).parent
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in sorted(devices.rglob("*.py"))
        if not str(path.relative_to(devices)).startswith(tuple(others))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if makes.search(line)
    ]
    assert found == []


PIXELS = re.compile(r"\b(uint8|255|CHW)\b")
OF_PICTURES = (
    "edge_fl/inputs.py",
    "edge_fl/learn/augment.py",
    "edge_fl/learn/pictures.py",
    "edge_fl/modalities/",
    "edge_fl/models/",
)
"""What may know pixels: the contract, the modalities, and torch code for pictures."""
OTHER_BYTES = {
    "devices/edge_fl_devices/flash/card_contents.py": "longest name of a file on a card",
    "devices/edge_fl_devices/flash/targets/ssh.py": "exit code of ssh",
    "devices/edge_fl_maker/labelling/moves.py": "longest name of a file",
    "edge_fl/heads/probability_calibration.py": "true or false in a file",
    "edge_fl/heads/promise.py": "true or false in a file",
    "edge_fl/secure/fixed_point.py": "bytes of masked numbers",
    "edge_fl/wire/tensors.py": "bytes of tensors, and the longest name of one",
}
"""Unrelated uses, with what they are."""
STILL_PICTURES = {
    "devices/edge_fl_maker/capture/camera.py",
    "devices/edge_fl_maker/capture/pools.py",
}
"""To do: modules that still take pictures only."""


def test_nothing_else_knows_pixels() -> None:
    """What a sample is made of, only `edge_fl.inputs` and `edge_fl.modalities` know; all else asks them."""
    having = {str(path.relative_to(ROOT)) for path in SOURCES if PIXELS.search(path.read_text())}
    having = {path for path in having if not path.startswith(OF_PICTURES)}
    assert having == {*OTHER_BYTES, *STILL_PICTURES}


def test_one_module_opens_pictures() -> None:
    homes = (
        "edge_fl/modalities/pictures.py",
        "edge_fl/modalities/formats.py",
    )  # the latter looks at headers that are open
    importing = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for name in imported(path)
        if name.partition(".")[0] == "PIL"
    }
    assert importing == set(homes)
    calls = [
        ast.unparse(node)
        for home in homes
        for node in ast.walk(ast.parse((ROOT / home).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Image.open")
    ]
    assert calls == ["Image.open(file, formats=[format.name])"]


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def unguarded(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, code) of threads and timers made without a guard, and of work given to a pool whose result nobody reads."""
    pools = "ThreadPoolExecutor" in ast.unparse(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="threading", names=names) if {"Thread", "Timer"} & {
                n.name for n in names
            }:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=ast.Name("threading"), attr="Thread" | "Timer")):
                yield node.lineno, ast.unparse(node)
            case ast.ClassDef(bases=bases) if any("threading." in ast.unparse(base) for base in bases):
                yield node.lineno, f"class {node.name}"
            case ast.Expr(ast.Call(func=ast.Attribute(attr="submit"), args=[first, *_])) if pools:
                if not ast.unparse(first).startswith("threads.guarded("):
                    yield node.lineno, ast.unparse(node)


def test_every_background_thread_is_guarded() -> None:
    """An exception would end it without a word: `edge_fl.threads` starts them all."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {code}"
        for path in SOURCES
        if path != ROOT / "edge_fl/threads.py"
        for line, code in unguarded(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthreading.Thread(target=run).start()",
        "import threading\nthreading.Timer(1, run)",
        "from threading import Event, Thread",
        "import threading\nclass Worker(threading.Thread): ...",
        "from concurrent.futures import ThreadPoolExecutor\npool.submit(run)",
    ],
)
def test_the_search_for_unguarded_threads_finds_each_kind(code: str) -> None:
    assert len(list(unguarded(ast.parse(code)))) == 1


def test_constraints_pin_every_direct_dependency_and_hold_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements} - {"edge-fl"}  # type: ignore[index]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9.]*", line) for line in lines)
    assert {line.partition("==")[0] for line in lines} == names


@pytest.mark.parametrize("package", [package for package in PACKAGES if package is not edge_fl])
def test_every_package_switches_the_telemetry_of_dependencies_off_first(package: Any) -> None:
    _, *statements = ast.parse(Path(str(package.__file__)).read_text()).body
    first = statements[0]
    assert isinstance(first, ast.Import) and [alias.name for alias in first.names] == ["edge_fl"]


def test_security_lists_every_variable_that_switches_telemetry_off() -> None:
    section = (ROOT / "docs/security.md").read_text().partition("## What dependencies would send")[2]
    assert set(re.findall(r"`([A-Z_]{4,}=\w+)`", section)) == {
        f"{name}={value}" for name, value in edge_fl.TELEMETRY_OFF.items()
    }


CACHED = {
    "edge_fl/modalities/limits.py:board_bytes": "the memory of the board",
    "edge_fl/heads/class_statistics/sums.py:_groups": "a function of two numbers",
    "edge_fl/learn/aggregation/screening.py:_signs": "a function of a length and a device of torch",
    "edge_fl/learn/batches.py:batches": "one key for the batches of one stage",
    "edge_fl/learn/stacked.py:batches": "one key for the batches of one stage",
    "edge_fl/models/kernels.py:_drawn": "a function of numbers",
    "edge_fl/models/weights.py:_sha256": "keyed by the time of the file",
    "edge_fl/models/weights.py:_read": "keyed by the time of the file",
    "edge_fl/secure/signatures.py:_issued": "keyed by the bytes of the certificate and the authorities",
    "edge_fl/wire/endpoint.py:_system_context": "the system's CAs, as every TLS client reads them once",
    "edge_fl/wire/mqtt/client.py:_connect_properties": "built from its arguments",
    "edge_fl/wire/mqtt/client.py:_properties": "built from its arguments",
    "devices/edge_fl_devices/features/extractor.py:runtime": "the onnxruntime that this process has loaded",
    "devices/edge_fl_maker/labelling/previews.py:of": "keyed by inode, size and time of the file, and what the release takes",
    "devices/edge_fl_devices/runtime/signatures.py:_decoded": "keyed by the bytes of the message",
    "server/edge_fl_server/selectors.py:version": "a function of a text",
    "server/edge_fl_lab/compare/cell_runs.py:_dataset": "a public data set, which no one writes during a command",
    "server/edge_fl_lab/compare/cell_runs.py:_data": "keyed by the data set in memory",
    "server/edge_fl_lab/compare/sources.py:of_framework": "the code that this process has loaded",
    "server/edge_fl_lab/compare/sources.py:_of_files": "the code that this process has loaded",
    "server/edge_fl_lab/compare/paper.py:tables": "a file of the package",
    "server/edge_fl_console/accuracy.py:_full_devices": "keyed by number and time of the reports, and the release of each device",
    "server/edge_fl_console/accuracy.py:_head_reports": "keyed by number and time of the reports, and the release of each device",
    "server/edge_fl_console/accuracy.py:_newest_accuracies": "keyed by number and time of the reports, and the release of each device",
    "server/edge_fl_server/mqtt/connector.py:connector": "one network loop for the clients of a connector",
    "server/edge_fl_server/recipes/__init__.py:_built_in": "files of the package",
    "server/edge_fl_server/recipes/hours.py:costs": "a file of the package",
    "server/edge_fl_server/training/engines/folders.py:_cleaner": "one helper of this process",
    "server/edge_fl_lab/ray.py:_run": "keyed by the placed run, which does not change",
    "server/edge_fl_server/training/engines/pool.py:_down": "keyed by the file of one broadcast, which is written once",
    "server/edge_fl_server/training/engines/pool.py:_run": "keyed by the folder of one run, which is written once",
}
"""The functions whose results may be kept for the life of a process: why they cannot change."""


def cached_functions(tree: ast.Module) -> Iterator[str]:
    """The functions that `functools` caches, or in which it caches another one; "" outside of all."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "functools"
        for alias in node.names
        if alias.name in ("cache", "lru_cache")
    }

    def below(node: ast.AST, function: str) -> Iterator[str]:
        function = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        attribute = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "functools"
        if (attribute and node.attr in ("cache", "lru_cache")) or getattr(node, "id", None) in imported:  # type: ignore[attr-defined]
            yield function
        for child in ast.iter_child_nodes(node):
            yield from below(child, function)

    return below(tree, "")


def test_nothing_that_changes_is_cached_for_the_life_of_a_process() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in SOURCES
        if "functools" in (text := path.read_text())
        for name in cached_functions(ast.parse(text))
    }
    assert found == CACHED.keys(), "give the owner of what changes a key of it, or state why it cannot change"


def test_the_search_for_caches_finds_decorators_and_calls() -> None:
    tree = ast.parse(
        "import functools\n"
        "from functools import cache, lru_cache\n"
        "@cache\ndef a(): ...\n"
        "@lru_cache(1)\ndef b(): ...\n"
        "class C:\n    @functools.cache\n    def c(self): ...\n"
        "def d():\n    load = lru_cache(1)(read)\n"
        "def e(file):\n    return file.cache\n"
        "f = lru_cache(read)\n"
    )
    assert [*cached_functions(tree)] == ["a", "b", "c", "d", ""]


READS_DATA = {"inspect", "look", "found", "now", "stamp", "walk", "snapshot", "count_for", "load_for"}
"""Functions below `run_device` that list, open or count pictures, or wait for a child that does."""


def calls_before_ready(tree: ast.Module) -> set[str]:
    """The functions that `run_device` calls before `runner.run`, which tells systemd that the agent is ready."""
    (function,) = (node for node in tree.body if getattr(node, "name", "") == "run_device")
    found, pending = set[str](), [*ast.iter_child_nodes(function)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef):
            continue  # called later, or by its own name
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "runner.run":
                continue
            name = node.func
            found.add(name.attr if isinstance(name, ast.Attribute) else ast.unparse(name))
        pending += ast.iter_child_nodes(node)
    return found


def test_nothing_that_grows_with_the_data_is_called_before_the_agent_is_ready() -> None:
    # tests/devices/runtime/test_ready.py runs an agent and watches its pictures
    text = (ROOT / "devices/edge_fl_devices/runtime/run_device.py").read_text()
    calls = calls_before_ready(ast.parse(text))
    assert {"inspect_board", "as_counted_last"} <= calls and not calls & READS_DATA
    broken = text.replace("found, problem = inspect_board(config, loader)", "loader.inspect(current.look())")
    assert calls_before_ready(ast.parse(broken)) & READS_DATA == {"inspect", "look"}


def test_what_decodes_pictures_is_loaded_for_pictures_only() -> None:
    loaded = "edge_fl_devices.runtime.run_device, edge_fl_devices.features.child_main, edge_fl_devices.serving.predict"
    command = f"import sys, {loaded}; sys.exit('PIL' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=60)


def test_what_a_head_only_device_loads_keeps_its_annotations_as_text() -> None:
    """Evaluated, they take about 2 MB of the memory of each process on a board; packages that need torch, and the server, do without."""
    evaluated = [
        str(path.relative_to(ROOT))
        for folder in ("edge_fl", "devices")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT).parts[:2]
        not in {("edge_fl", name) for name in ("learn", "methods", "models")}
        and has_annotations(text := path.read_text())
        and "\nfrom __future__ import annotations\n" not in text
    ]
    assert not evaluated


def has_annotations(text: str) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in ast.walk(ast.parse(text)))


def test_files_that_the_code_names_exist() -> None:
    """Such as a page of docs/ in an error, or the test that holds a claim: what moves takes its mentions along."""
    named = re.compile(
        r"(?<![\w/.-])(?:tests|tools|docs|edge_fl|broker|devices|server)/[\w/-]+\.(?:py|md|sh|json|toml)\b"
    )
    folders = ("edge_fl", "broker", "devices", "server", "tests", "tools")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders)
        for name in named.findall(path.read_text())
        if not (ROOT / name).exists()
    }
    example = "edge_fl/" + "no.py"
    assert missing == {f"tests/test_docs.py: {example}"}
