"""Numbers and JSON of other programs."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest

from edge_fl import metrics
from edge_fl.errors import ArtefactError
from edge_fl.heads import from_arrays
from edge_fl.release import manifests
from edge_fl.untrusted import NOT_JSON, whole
from tests.numbers import WRONG_NUMBERS
from tests.releases import MakeRelease

PACKAGES = ("edge_fl", "broker", "devices", "server")


@pytest.mark.parametrize("number", WRONG_NUMBERS, ids=lambda number: number[:12])
def test_only_digits_are_a_number(number: str) -> None:
    text = unquote(number)
    assert whole(text, 10**9) is None
    assert metrics.by_labels({f"labels_{text}.head.ridge.test_acc": 1.0}) == {}
    with pytest.raises(ArtefactError, match="head file"):
        from_arrays({}, {"kind": "logistic", "classes": text})


def test_a_number_has_a_limit() -> None:
    assert [whole(text, 99) for text in ("0", "7", "07", "99", "100", "007")] == [0, 7, 7, 99, None, None]


@pytest.mark.parametrize(
    "payload", [b"{", b'{"a":"\xff"}', b"[" * 100_000, b"1e999", b"NaN", b"9" * 5000, b'"\\ud800"']
)
def test_what_is_no_json_raises_one_of_these(payload: bytes) -> None:
    with pytest.raises(NOT_JSON):
        msgspec.json.decode(payload)


def test_no_module_catches_a_part_of_what_a_decoder_raises_or_parses_digits_itself() -> None:
    root = Path(sys.modules["edge_fl"].__file__ or "").parents[1]
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if path.name != "untrusted.py"
        for line in path.read_text().splitlines()
        if re.search(r"msgspec\.DecodeError|\.isdigit\(|\.isnumeric\(", line)
    ]
    assert not found


FIRST_READ_BY_THREADS = """
import sys, threading
from edge_fl.release.manifests import decode

sys.setswitchinterval(1e-5)
payload, begin, read = sys.stdin.read(), threading.Barrier(4), []

def work():
    begin.wait()
    read.append(decode(payload).release)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(read)
"""


def test_threads_that_read_the_first_message_of_a_type_do_not_crash(make_release: MakeRelease) -> None:
    """As the threads of a simulated fleet do; msgspec alone ended two of three such processes by SIGSEGV."""
    payload = manifests.encode(make_release(7)[0])
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_READ_BY_THREADS], input=payload, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, b"[7, 7, 7, 7]\n"), done.stderr
