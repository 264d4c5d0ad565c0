"""Child processes that end themselves by a signal: real processes, at their start, at their first output, or when they load a package."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

SITE = """
import importlib.abc, os, signal, sys

def die():
    deaths = os.listdir("DEATHS")
    if deaths or ALWAYS:
        if deaths:
            os.rmdir("DEATHS/" + deaths[0])  # a child may be forbidden to write files
        os.kill(os.getpid(), signal.SIGNAL)

class Deadly(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "WHEN":
            die()

class Output:
    def __init__(self, output):
        self._output = output
    def __getattr__(self, name):
        return getattr(self._output, name)
    def flush(self):
        self._output.flush()
        die()

if any("MODULE" in argument for argument in sys.orig_argv):
    if "WHEN" == "start":
        die()
    elif "WHEN" == "output":
        opened = os.fdopen
        os.fdopen = lambda *arguments: Output(opened(*arguments))  # of `edge_fl_devices.child.serve`
    else:
        sys.meta_path.insert(0, Deadly())
"""


@dataclass(frozen=True)
class Deaths:
    """The deaths that are still to come, as folders that the children remove."""

    folder: Path

    @property
    def left(self) -> int:
        return len(list(self.folder.iterdir()))


def deadly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, times: int = 0, when: str = "start"
) -> Deaths:
    """Let the next `times` children (0: all) whose command line holds `module` end by the signal `name`."""
    folder.mkdir()
    for number in range(times):
        (folder / "deaths" / str(number)).mkdir(parents=True)
    (folder / "deaths").mkdir(exist_ok=True)
    code = SITE.replace("DEATHS", str(folder / "deaths")).replace("ALWAYS", str(not times))
    code = code.replace("SIGNAL", name).replace("MODULE", module)
    (folder / "sitecustomize.py").write_text(code.replace("WHEN", when))
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return Deaths(folder / "deaths")
