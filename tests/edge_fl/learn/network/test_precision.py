"""Half precision where the processor does not compute in it."""

import os
import subprocess
import sys

import pytest

from edge_fl.errors import ConfigError
from edge_fl.learn.network import precision


def test_fp16_is_rejected_on_a_cpu_only() -> None:
    with pytest.raises(
        ConfigError, match="at least ten times slower than fp32 on a CPU; expected fp32 or bf16"
    ):
        precision.require_trainable("fp16", "cpu")
    precision.require_trainable("fp16", "cuda:0")
    precision.require_trainable("bf16", "cpu")


def test_bf16_is_slow_on_a_processor_without_it() -> None:
    code = """
from edge_fl.learn.network.precision import slowdown
print(slowdown("bf16", "cpu"), slowdown("fp32", "cpu"), slowdown("bf16", "cuda"), sep="|")
"""
    emulated = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | emulated,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    bf16, fp32, on_gpu = done.stdout.strip().split("|")
    assert "no bf16 instructions" in bf16 and 'set precision = "fp32"' in bf16
    assert fp32 == on_gpu == ""
