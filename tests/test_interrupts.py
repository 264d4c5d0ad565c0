"""Signals end a command by KeyboardInterrupt, after an import that is running."""

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import signal, time
for _ in range(2):
    signal.raise_signal(signal.SIGNAL)
time.sleep(0.2)
print("imported")
"""
COMMAND = """
import signal, time
from edge_fl.signals import interrupting
signal.signal(signal.SIGINT, signal.HANDLER)
try:
    with interrupting():
        import slow
        time.sleep(0.5)
        print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
print(signal.getsignal(signal.SIGINT) is signal.HANDLER, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


@pytest.mark.parametrize(
    ("name", "handler", "ending"),
    [
        ("SIGINT", "default_int_handler", "interrupted"),
        ("SIGTERM", "default_int_handler", "interrupted"),
        ("SIGTERM", "SIG_IGN", "interrupted"),
        ("SIGINT", "SIG_IGN", "not interrupted"),
    ],
)
def test_a_signal_during_an_import_is_raised_once_after_it(
    name: str, handler: str, ending: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.replace("SIGNAL", name))
    code = COMMAND.replace("HANDLER", handler)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["imported", ending, "True True"], done.stderr


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_what_serves_ends_by_either_signal_also_in_the_background_of_a_script(
    name: str, handler: str
) -> None:
    """A shell sets SIGINT to ignored for a command that a script starts with "&"."""
    serving = (
        f"with serving(print):\n            signal.raise_signal(signal.{name})\n        print('goes on')"
    )
    code = COMMAND.replace("HANDLER", handler).replace("import interrupting", "import interrupting, serving")
    code = code.replace("import slow", serving).replace("time.sleep(0.5)", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    how = {"SIGINT": "stopped by Ctrl-C", "SIGTERM": "stopped by SIGTERM"}[name]
    assert done.stdout.splitlines() == [how, "goes on", "not interrupted", "True True"], done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_outside_an_import_is_raised_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("")
    raising = f"import slow\n        signal.raise_signal(signal.{name})\n        print('too late')"
    code = COMMAND.replace("HANDLER", "default_int_handler").replace("import slow", raising)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted", "True True"], done.stderr


def test_an_interrupt_that_foreign_code_swallows_is_raised_again(tmp_path: Path) -> None:
    signals = "import signal\nclass Swallowing:\n    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "foreign.py").write_text(signals)
    ours = "import foreign\ndef run():\n    foreign.Swallowing()\n    print('too late')\n"
    (tmp_path / "edge_fl_own.py").write_text(ours)
    code = COMMAND.replace("HANDLER", "default_int_handler").replace("import slow", "own.run()")
    code = f"import edge_fl_own as own\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted", "True True"], done.stderr
    assert "Exception ignored" in done.stderr


def test_an_interrupt_while_the_command_itself_is_imported_is_not_lost() -> None:
    """Python ignores exceptions in callbacks of weak references, and its imports have some."""
    starting = """
import runpy, signal, sys, weakref

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "edge_fl.cli":
            found = type("Found", (), {})()
            self.kept = weakref.ref(found, lambda gone: signal.raise_signal(signal.SIGINT))
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Finder())
sys.argv = ["edge-fl", "--version"]
runpy.run_module("edge_fl", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", starting], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "edge-fl: stopped by Ctrl-C\n")


def test_an_import_that_fails_does_not_lose_the_interrupt(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\nimport missing_package\n"
    )
    code = COMMAND.replace("HANDLER", "default_int_handler")
    code = code.replace(
        "import slow", "try: import slow\n        except ImportError: print('no such module')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted", "True True"], done.stderr
