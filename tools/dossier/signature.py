"""Sign a small release with `edge-fl release sign` and verify it with the command of model-signing."""

import subprocess
import sys
import tempfile
from pathlib import Path


def check_signature() -> str:
    """Sign an exported release, verify it, and verify it again with one byte changed -> the commands' output. Raises ValueError."""
    with tempfile.TemporaryDirectory() as scratch:
        release = Path(scratch) / "targets/1"
        release.mkdir(parents=True)
        model = release / "extractor.onnx"
        model.write_bytes(b"a model")
        key = Path(scratch) / "signing.pem"
        signed = _run("edge_fl", "release", "sign", scratch, "--signing-key", str(key))
        verified = verify(release, key.with_name("signing.pem.pub"))
        model.write_bytes(b"A model")
        changed = verify(release, key.with_name("signing.pem.pub"))
    output = "".join(f"{done.stdout}{done.stderr}" for done in (signed, verified, changed))
    if signed.returncode or verified.returncode or not changed.returncode:
        raise ValueError(output.strip()[-500:])
    return output.replace(scratch, "EXPORT")


def verify(release: Path, public_key: Path) -> subprocess.CompletedProcess[str]:
    """Call model-signing's own command."""
    signature = str(release / "model.sig")
    options = ["--signature", signature, "--ignore-paths", signature, "--public_key", str(public_key)]
    return _run("model_signing", "verify", "key", str(release), *options)


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
