"""Read a foreign ONNX model in a child process (`python -m`) with limits on memory and time, and return the converted one."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import process_limits, signals
from edge_fl.errors import DataError, InputError, brief
from edge_fl.files import npz
from edge_fl.files.paths import text
from edge_fl.modalities import scaled
from edge_fl_server.release import foreign
from edge_fl_server.release.foreign import Converted, ForeignInput, Reference

MEBIBYTE = 1024 * 1024
KILLS = 3  # deaths by a signal in a row from which on they are no accident
LIMITED = (-signal.SIGXCPU, -signal.SIGKILL)  # return codes of a child that exceeded a limit
COPIES = 9  # of the file in memory: parsed, converted, serialised, in two sessions, printed


@dataclass(frozen=True)
class ForeignLimits:
    """Limits of the child beyond an idle process: address space (plus COPIES of the file), processor time, wall time."""

    memory_mb: int = 2048
    cpu_s: int = 300
    deadline_s: float = 600.0


class _Request(Struct):
    path: str
    given: ForeignInput
    reference: str
    limits: ForeignLimits


def read(
    path: Path,
    given: ForeignInput,
    reference: Path | None = None,
    limits: ForeignLimits = ForeignLimits(),
) -> Converted:
    """Check and convert a model in a child. Raises InputError as `foreign.convert`, also for one that exceeds the limits."""
    if not path.is_file():
        raise InputError(f"{text(path)}: no such file; expected an ONNX model")
    answer = _ask(_Request(os.fspath(path), given, os.fspath(reference or ""), limits), path, limits)
    if isinstance(answer, str):
        raise InputError(answer)
    return answer


def _ask(request: _Request, path: Path, limits: ForeignLimits) -> Converted | str:
    """The converted model, or why it was rejected. Raises InputError for a child that ends otherwise."""
    command = [sys.executable, "-P", "-m", "edge_fl_server.release.foreign_child"]
    content = msgspec.msgpack.encode(request)
    try:
        for _ in range(KILLS):  # only a model that always crashes is rejected
            child = subprocess.run(
                command, input=content, capture_output=True, timeout=limits.deadline_s, check=False
            )
            if child.returncode >= 0 or child.returncode in LIMITED:
                break
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{text(path)}: no result within {limits.deadline_s:g} s; expected a model that returns"
        ) from error
    if child.returncode == 0 and child.stdout:
        return msgspec.msgpack.decode(child.stdout, type=Converted | str)
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if child.returncode < 0 or not last:
        last = [f"the child {signals.ending(child.returncode)}"]
    raise InputError(
        f"{text(path)}: needs more than {limits.memory_mb} MiB of memory or {limits.cpu_s} s of processor time, or crashes"
        f" ({brief(last[0])}); expected a model that runs on small devices"
    )


def _reference(path: Path) -> Reference:
    content = npz.read(path)
    if not {"x", "features"} <= content.keys():
        raise DataError(
            f"{text(path)}: holds {', '.join(content) or 'nothing'}; expected x [N, ...] and features [N, d]"
        )
    x, features = content["x"], content["features"]
    if x.ndim < 2 or len(x) != len(features) or not len(x):
        raise DataError(
            f"{text(path)}: x is {list(x.shape)}, features {list(features.shape)}; expected [N, ...] and [N, d]"
        )
    return Reference(scaled(x), features.reshape(len(x), -1).astype(np.float32))


def main() -> None:
    """Read the request from stdin, and print the converted model or why it is rejected."""
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Request)
    path = Path(request.path)
    memory_bytes = request.limits.memory_mb * MEBIBYTE + COPIES * path.stat().st_size
    process_limits.limit_child(memory_bytes, request.limits.cpu_s)
    try:
        reference = _reference(Path(request.reference)) if request.reference else None
        answer = msgspec.msgpack.encode(foreign.convert(path, request.given, reference))
    except InputError as error:
        answer = msgspec.msgpack.encode(error.message)
    except MemoryError:
        needs = f"needs more than {request.limits.memory_mb} MiB of memory; expected less"
        answer = msgspec.msgpack.encode(f"{text(path)}: {needs}")
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main()
