"""The tier is what was measured, and may be limited by a person but never lifted."""

import subprocess
import sys
from pathlib import Path

from edge_fl.fields import Tier
from edge_fl.wire import messages
from edge_fl_devices.board import capabilities
from edge_fl_devices.board.capabilities import FULL_MIN_MEMORY_MB


def test_a_device_with_torch_and_memory_is_full() -> None:
    assert capabilities.choose_tier(FULL_MIN_MEMORY_MB, torch=True)[0] is Tier.FULL


def test_a_device_without_torch_or_memory_is_head_only_and_says_why() -> None:
    assert capabilities.choose_tier(8000, torch=False) == (Tier.HEAD, "head: torch is not installed")
    chosen, why = capabilities.choose_tier(FULL_MIN_MEMORY_MB - 1, torch=True)
    assert chosen is Tier.HEAD and f"{FULL_MIN_MEMORY_MB - 1} MB" in why


def test_a_person_may_limit_a_device_but_not_lift_it() -> None:
    assert capabilities.choose_tier(8000, torch=True, limit=Tier.HEAD)[0] is Tier.HEAD
    assert capabilities.choose_tier(8000, torch=False, limit=Tier.FULL)[0] is Tier.HEAD


def test_a_measurement_describes_this_machine(tmp_path: Path) -> None:
    found = capabilities.measure(
        folder=tmp_path / "not" / "yet", samples_per_class=[3, 0, 4], head="svm", limit=Tier.HEAD
    )
    assert (found.tier, found.samples, found.samples_per_class, found.head) == ("head", 7, [3, 0, 4], "svm")
    assert found.memory_mb > 0 and found.disk_free_mb > 0 and found.machine and found.python.startswith("3.")
    assert messages.decode(messages.encode(found), messages.Capability) == found


def test_measuring_imports_nothing_heavy(tmp_path: Path) -> None:
    script = f"""
import sys; from pathlib import Path; from edge_fl_devices.board import capabilities
capabilities.measure(folder=Path({str(tmp_path)!r}))
print([name for name in ("torch", "sklearn", "onnxruntime", "onnx") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
