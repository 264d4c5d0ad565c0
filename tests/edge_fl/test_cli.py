"""Commands end with one line and the documented exit code, and start fast."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from edge_fl import __version__, cli
from edge_fl.cli import App, load, main
from edge_fl.console.output import QUIET, Format, print_status, show_table
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, RunError
from edge_fl.options import FormatOption
from edge_fl.signals import Terminated

EDGE_FL = [sys.executable, "-m", "edge_fl"]
HEAVY = {
    "numpy",
    "rich",
    "msgspec",
    "torch",
    "torchvision",
    "onnx",
    "onnxruntime",
    "sklearn",
    "scipy",
    "matplotlib",
    "pandas",
    "nicegui",
    "sqlalchemy",
    "paho",
    "tuf",
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks go to the test's folder, and --quiet ends with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(QUIET, "")
    monkeypatch.delenv(QUIET)


def app_with(command: Callable[..., object], name: str = "go") -> App:
    app = App()
    app.root.command(name)(command)
    return app


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "consequence"),
    [
        (RunError, 1, ""),
        (ConnectError, 2, ""),
        (DeadlineError, 3, ""),
        (ConfigError, 4, "; nothing was changed"),
    ],
)
def test_an_error_of_edge_fl_prints_one_line_and_returns_its_exit_code(
    error: type[Exception], code: int, consequence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(app_with(raising(error("model: 'x',\n  expected 'y'"))), ["go"]) == code
    assert capsys.readouterr() == ("", f"edge-fl: model: 'x', expected 'y'{consequence}\n")


def test_an_interrupt_prints_a_line_and_returns_130(capsys) -> None:
    assert cli._run(app_with(raising(KeyboardInterrupt())), ["go"]) == 130
    assert capsys.readouterr() == ("", "edge-fl: stopped by Ctrl-C\n")
    assert cli._run(app_with(raising(Terminated())), ["go"]) == 143
    assert capsys.readouterr() == ("", "edge-fl: stopped by SIGTERM\n")


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        (["--quiet", "fleet", "list"], ["fleet list --format"]),
        (["fleet", "list", "up"], ["fleet list --format"]),
        (["fleet"], ["fleet list", "fleet up"]),
        (["fleet", "upp"], ["fleet list", "fleet up"]),
        (["--help"], ["device list", "device up", "fleet list", "fleet up"]),
        (["flee"], ["device list", "device up", "fleet list", "fleet up"]),
    ],
)
def test_only_the_named_command_gets_options(arguments: list[str], built: list[str]) -> None:
    app = App()
    for group in ("device", "fleet"):
        for name in ("list", "up"):
            app.group(group).add(listing, "an example", name=name)
    root: Any = get_command(cli.named(app.root, arguments))
    assert built == [
        " ".join([group, name, *(option for parameter in command.params for option in parameter.opts)])
        for group, found in root.commands.items()
        for name, command in found.commands.items()
    ]


def test_a_declined_question_is_no_success() -> None:
    assert cli._run(app_with(raising(typer.Abort())), ["go"]) == 1


def test_a_command_may_choose_its_exit_code() -> None:
    assert cli._run(app_with(raising(typer.Exit(3))), ["go"]) == 3
    assert cli._run(app_with(lambda: None), ["go"]) == 0


def test_a_bug_is_one_line_and_its_traceback_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = app_with(written_in(Path(cli.__file__).with_name("division.py")))
    assert cli._run(app, ["go"]) == 1
    line = capsys.readouterr().err
    found = re.fullmatch(
        r"edge-fl: unexpected ZeroDivisionError: 1/0, really \(division\.py:2\); this is a bug, its traceback is in (\S+)\n",
        line,
    )
    assert found, line
    assert Path(found[1]).parent == tmp_path / "edge-fl"
    assert "Traceback (most recent call last)" in Path(found[1]).read_text()


def written_in(file: Path) -> Callable[[], None]:
    """A command as if it were code of this file."""
    defined: dict[str, Any] = {}
    code = "def go():\n    raise ZeroDivisionError('1/0,\\nreally')\n"
    exec(compile(code, str(file), "exec"), defined)
    return defined["go"]  # type: ignore[no-any-return]


def test_an_error_in_a_user_s_own_code_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gentle.py").write_text("\n    return here\n")
    for file in (Path("gentle.py"), tmp_path / "gentle.py", Path("../elsewhere/gentle.py")):
        assert cli._run(app_with(written_in(file.absolute())), ["go"]) == 1
        said = capsys.readouterr().err
        assert "gentle.py:2" in said and "ZeroDivisionError: 1/0, really; this is code of your own" in said
        assert ('gentle.py:2, "return here"' in said) == (file.parent.name != "elsewhere")
    for file in (Path(re.__file__), tmp_path / "site-packages/other.py", Path("<string>")):
        assert cli._run(app_with(written_in(file)), ["go"]) == 1
        assert "this is a bug" in capsys.readouterr().err


def test_an_argument_that_is_not_utf8_where_text_is_stored_is_bad_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli._run(app_with(_stores_its_name), ["go", "caf\udce9"]) == 4
    assert "argument 'caf\\xe9': not UTF-8" in capsys.readouterr().err


def _stores_its_name(name: str) -> None:
    name.encode()


def test_the_traceback_of_a_bug_with_such_a_name_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(app_with(raising(ZeroDivisionError("caf\udce9"))), ["go"]) == 1
    (file,) = (tmp_path / "edge-fl").iterdir()
    assert "ZeroDivisionError: caf\\xe9" in file.read_text() and str(file) in capsys.readouterr().err


def test_the_same_bug_keeps_one_file(tmp_path: Path) -> None:
    for number in range(3):
        cli._run(app_with(raising(ZeroDivisionError(number))), ["go"])
    assert len(list((tmp_path / "edge-fl").iterdir())) == 1


def test_a_traceback_goes_elsewhere_when_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert cli._run(app_with(raising(ZeroDivisionError())), ["go"]) == 1
    assert f"{tmp_path}/temporary/traceback-" in capsys.readouterr().err


def numbered(count: int, size: Annotated[int, typer.Option(min=1)] = 1) -> None:
    """Needs a number."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "No such command 'nowhere'; nothing was changed, see 'edge-fl --help'"),
        (["god"], "No such command 'god'. Did you mean 'go'?; nothing was changed, see 'edge-fl --help'"),
        (["go"], "Missing argument 'count'; nothing was changed, see 'edge-fl go --help'"),
        (["go", "x"], "Invalid value for 'count'"),
        (["go", "1", "--size", "0"], "'--size'"),
        (["go", "1", "--nothing"], "No such option: --nothing"),
        (["--nothing"], "No such option: --nothing; nothing was changed, see 'edge-fl --help'"),
    ],
)
def test_a_wrong_command_line_is_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(app_with(numbered), arguments) == 4
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("edge-fl: ") and err.count("\n") == 1
    assert message.lower() in err.lower()


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    app = App()
    app.group("fleet", "The devices that exist.").command("list")(lambda: None)
    assert cli._run(app, []) == 0
    assert "fleet  The devices that exist." in capsys.readouterr().out
    assert cli._run(app, ["fleet"]) == 0
    assert "Usage: edge-fl fleet" in capsys.readouterr().out


def test_two_packages_share_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    app = App()
    app.group("fleet").command("up")(lambda: print("up"))
    app.group("fleet", "The devices.").command("list")(lambda: print("listed"))
    assert cli._run(app, ["fleet", "up"]) == cli._run(app, ["fleet", "list"]) == 0
    assert capsys.readouterr().out == "up\nlisted\n"
    cli._run(app, ["--help"])
    assert capsys.readouterr().out.count("fleet") == 1


def entry_point(folder: Path, name: str, text: str) -> EntryPoint:
    (folder / f"commands_of_{name}.py").write_text(text)
    return EntryPoint(name, f"commands_of_{name}:register", cli.ENTRY_POINTS)


def test_commands_that_cannot_be_loaded_hinder_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    good = "def register(app):\n    app.root.command('go')(lambda: print('gone'))\n"
    app = load(
        [
            entry_point(tmp_path, "server", "import no_such_module_as_this\n"),
            entry_point(tmp_path, "broken", "1 / 0\n"),
            entry_point(tmp_path, "devices", good),
            EntryPoint("ghost", "no_such_package.cli:register", cli.ENTRY_POINTS),
        ]
    )
    assert cli._run(app, ["go"]) == 0
    assert capsys.readouterr().out == "gone\n"
    assert app.unavailable.keys() == {"broken", "ghost", "server"}
    assert cli._run(app, ["--help"]) == 0
    assert "server (ModuleNotFoundError: No module named 'no_such_module_as_this')" in " ".join(
        capsys.readouterr().out.split()
    )
    assert cli._run(app, ["simulate"]) == 4
    assert "broken (ZeroDivisionError: division by zero)" in capsys.readouterr().err


BAN = """
import sys
import tomllib
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {banned!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Ban())
from edge_fl import cli
app = cli.App()
def command():
    exec(compile({code!r}, {package!r}, "exec"), {{"__name__": {package!r}}})
app.root.command("go")(command)
sys.exit(cli._run(app, ["go"]))
"""


@pytest.mark.parametrize(
    ("package", "code", "extra"),
    [
        ("edge_fl_server.training.rounds", "import torch", "server"),
        ("edge_fl_devices.workers.full", "import torch.nn", "full"),
        ("edge_fl_devices.workers.full", "from torchvision import models", "full"),
        ("edge_fl_server.release.export", "import onnx", "server"),
        ("edge_fl_console.dashboard", "import prometheus_client", "server"),
        ("edge_fl_lab.ray", "import ray", "scale"),
    ],
)
def test_a_missing_extra_is_named(package: str, code: str, extra: str) -> None:
    module = re.split(r"[ .]", code)[1]
    script = BAN.format(banned={module}, code=code, package=package)
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert child.stderr == f"edge-fl: needs pip install 'edge-fl[{extra}]' ({module} is not installed)\n"
    assert child.returncode == 1


def test_a_missing_module_of_no_extra_is_of_the_code_that_imports_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> None:
        import no_such_module_as_this  # type: ignore[import-not-found]  # noqa: F401

    assert cli._run(app_with(command), ["go"]) == 1
    assert "No module named 'no_such_module_as_this'; this is code of your own" in capsys.readouterr().err


ROWS = [
    {"device": "pi-1", "acc": 0.98765, "ready": True},
    {"device": "[red]pi-2", "acc": None, "ready": False},
]
COLUMNS = {"device": "Device", "acc": "Accuracy"}


def test_a_table_is_aligned_text_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS, COLUMNS)
    assert capsys.readouterr().out == "Device     Accuracy\npi-1          0.988\n[red]pi-2         -\n"


def test_a_table_as_json_has_the_columns_and_every_digit(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([*ROWS, {"device": Path("pi-3")}], COLUMNS, Format.JSON)
    assert json.loads(capsys.readouterr().out) == [
        {"device": "pi-1", "acc": 0.98765},
        {"device": "[red]pi-2", "acc": None},
        {"device": "pi-3", "acc": None},
    ]


def test_an_empty_table_still_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([], COLUMNS)
    show_table([], COLUMNS, Format.JSON)
    assert capsys.readouterr().out == "Device  Accuracy\n[]\n"


def test_a_table_on_a_terminal_shows_what_came_and_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_table(ROWS, COLUMNS)
    out = capsys.readouterr().out
    assert "[red]pi-2" in out and "0.988" in out and "Accuracy" in out


def listing(format: FormatOption = Format.TABLE) -> None:
    show_table(ROWS, COLUMNS, format)


def test_a_listing_takes_the_format_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(app_with(listing), ["go", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert cli._run(app_with(listing), ["go", "--format", "yaml"]) == 4
    assert "'yaml'" in capsys.readouterr().err


def test_quiet_silences_progress_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        print_status("round 1 of 5")
        print("0.98")

    assert cli._run(app_with(command), ["go"]) == 0
    assert capsys.readouterr() == ("0.98\n", "round 1 of 5\n")
    assert cli._run(app_with(command), ["--quiet", "go"]) == 0
    assert capsys.readouterr() == ("0.98\n", "")


def test_lines_that_are_piped_together_keep_their_order() -> None:
    program = (
        "from edge_fl.console.output import print_status as say\nprint('table')\nsay('answer')\nprint('end')"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": buffered}
    done = subprocess.run([sys.executable, "-c", program], check=True, **piped)  # type: ignore[call-overload]
    assert done.stdout == "table\nanswer\nend\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"edge-fl {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys; from edge_fl.cli import main; main(['--help']); sys.exit(str({HEAVY!r} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Usage: edge-fl" in child.stdout
    assert child.stderr == "set()\n"


COUNT = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
from edge_fl.cli import main
main(["--help"])
sys.setprofile(None)
sys.stderr.write(f"{len(sys.modules)} {calls}")
"""


def test_help_does_little_work() -> None:
    """About an eighth of a second; counted, because a time depends on the processor and on who else uses it."""
    child = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=60)
    modules, calls = map(int, child.stderr.split())
    assert "Usage: edge-fl" in child.stdout
    assert modules <= 330 and calls <= 140_000  # 261 and 83,000 when this was written


def test_every_entry_point_loads() -> None:
    child = subprocess.run(
        [*EDGE_FL, "--help"], capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"}
    )
    assert child.returncode == 0
    assert "Unavailable" not in child.stdout, child.stdout


def test_the_installed_script_starts_where_an_early_ctrl_c_is_handled():
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"edge-fl": "edge_fl.__main__:main"}


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["nosuchcommand"], 4)])
def test_a_command_ends_without_freeing_what_libraries_made_and_after_all_else(
    arguments: list[str], code: int
) -> None:
    """Handlers and threads still end as they would; the interpreter does not take modules down, which takes seconds after torch."""
    program = f"""
import atexit, sys, threading, time
from edge_fl.__main__ import main

class Library:
    def __del__(self):
        print("freed")

library = Library()
library.itself = library
thread = threading.Thread(target=lambda: (time.sleep(0.5), print("thread ended")))
sys.argv = ["edge-fl", *{arguments}]
code = main()
thread.start()
atexit.register(print, "handler ran", end="")
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (code, ["thread ended", "handler ran"])
    assert "freed" not in done.stdout
