"""`--once-more` lets a run pass whose failed tests pass alone, names them, and hides nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAKY = """
from pathlib import Path
import pytest

SEEN = Path(__file__).with_name("seen")

@pytest.mark.parametrize("name", ["a [b]"])
def test_flaky(name):
    seen = SEEN.exists()
    SEEN.touch()
    assert seen, "the first time"

@pytest.fixture
def broken():
    seen = SEEN.with_name("fixture")
    if not seen.exists():
        seen.touch()
        raise OSError("at its first use")

def test_flaky_fixture(broken): pass

def test_good(): pass
"""
BAD = "def test_bad(): assert False, 'each time'\n"


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.once_more"]\n')
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", [[], ["-p", "xdist.plugin", "-n", "2"]])
def test_a_test_that_passes_alone_is_named_and_does_not_fail_the_run(
    tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "test_one.py").write_text(FLAKY)
    code, output = run(tmp_path, "--once-more", *workers)
    assert code == 0, output
    assert (
        "flaky: test_one.py::test_flaky[a [b]]\n" in output
        and "    E       AssertionError: the first time" in output
    )
    assert "flaky: test_one.py::test_flaky_fixture\n" in output and "2 flaky" in output
    assert "failed" not in output.splitlines()[-1] and "error" not in output.splitlines()[-1]


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(FLAKY + BAD)
    code, output = run(tmp_path, "--once-more")
    assert code == 1 and "flaky: test_one.py::test_flaky[a [b]]" in output
    assert "FAILED test_one.py::test_bad" in output and "1 failed" in output.splitlines()[-1]


@pytest.mark.parametrize("text", ["import missing\n", "def test_bad(: pass\n"])
def test_a_file_that_cannot_be_read_is_no_flaky_test(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_one.py").write_text(text)
    code, output = run(tmp_path, "--once-more")
    assert code == 2 and "flaky:" not in output


def test_without_the_option_nothing_runs_again(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(FLAKY)
    code, output = run(tmp_path)
    assert code == 1 and "flaky:" not in output


def test_many_failures_do_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        f"{FLAKY}\n@pytest.mark.parametrize('n', range(10))\ndef test_bad(n): assert n < 0\n"
    )
    code, output = run(tmp_path, "--once-more")
    assert code == 1 and "flaky:" not in output
