"""Version and capabilities of the device's onnxruntime, as a value that the agent can hold without importing onnxruntime."""

from __future__ import annotations

from msgspec import Struct

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.release.manifests import Manifest


class Runtime(Struct, frozen=True):
    """onnxruntime's version and the highest ONNX opset that it loads (`edge_fl_devices.features.extractor.runtime`)."""

    version: str
    max_opset: int


def require_runnable(manifest: Manifest, runtime: Runtime) -> None:
    """Check before the download that this runtime is new enough. Raises ArtefactError ("unsupported_opset")."""
    needs = f"release {manifest.release} needs"
    if _numbers(runtime.version) < _numbers(manifest.min_onnxruntime):
        raise _unsupported(f"{needs} onnxruntime {manifest.min_onnxruntime}, this is {runtime.version}")
    if manifest.opset > runtime.max_opset:
        raise _unsupported(
            f"{needs} opset {manifest.opset}, onnxruntime {runtime.version} runs up to {runtime.max_opset}"
        )


def _unsupported(reason: str) -> ArtefactError:
    return ArtefactError(reason, Failure.UNSUPPORTED_OPSET, consequence="the installed release keeps serving")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])
