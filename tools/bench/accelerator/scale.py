"""Device and sizes of the GPU benchmark, and memory measurement on the device."""

import os
from dataclasses import dataclass

import torch

from tools.bench.measure import tree_bytes

BATCH = 10


@dataclass(frozen=True)
class Scale:
    """Sizes of all items; the comments name the item."""

    device: str
    clients: int  # work A, single steps
    samples: int  # work A
    many: int  # equal clients, heads
    steps: int  # single steps per turn
    backend: str  # of torch.compile
    start: tuple[int, int]  # quick start: clients, images
    published: tuple[int, int, int, int]  # BlazeFL: clients, images of a client for training, rounds, epochs
    deep: tuple[str, ...]  # A6: work A with deeper networks
    models: tuple[str, ...]  # single steps, limits, memory
    crowd: tuple[int, ...]  # memory: clients, for each of `models`
    gemm: int  # limits: side of the matrices
    copied: int  # limits: floats of the copy

    @property
    def real(self) -> bool:
        """Whether the figures are meaningful."""
        return self.device != "cpu"


FULL = Scale(
    device="cuda",
    clients=20,
    samples=4492,
    many=100,
    steps=20,
    backend="inductor",
    start=(20, 70_000),
    published=(100, 500, 5, 5),
    deep=("resnet18", "resnet34"),
    models=("cnn2", "resnet18", "resnet34"),
    crowd=(1500, 300, 200),
    gemm=8192,
    copied=1 << 28,
)
TINY = Scale(
    device="cpu",
    clients=2,
    samples=16,
    many=3,
    steps=1,
    backend="eager",
    start=(3, 240),
    published=(2, 4, 2, 1),
    deep=("resnet18",),
    models=("cnn2",),
    crowd=(3,),
    gemm=128,
    copied=1 << 16,
)


def scale() -> Scale:
    """The full scale if there is a GPU, else the tiny one."""
    return FULL if torch.cuda.is_available() else TINY


def forget_peak(device: str) -> None:
    """Free cached memory and start a new measurement of the peak; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_mb(device: str) -> float:
    """Largest memory allocated since `forget_peak`, in MB; on a CPU the memory of this process and its children now."""
    peak = tree_bytes(os.getpid()) if device == "cpu" else torch.cuda.max_memory_allocated(device)
    return peak / 1e6
