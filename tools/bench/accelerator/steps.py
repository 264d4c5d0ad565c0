"""Single training steps of equal clients: one after the other, stacked, compiled by torch.compile, and replayed as a CUDA graph."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn import functional as F

from edge_fl_server.training.studies import ClientStore
from tools.bench import workloads
from tools.bench.accelerator.scale import BATCH, Scale, forget_peak, peak_mb
from tools.bench.figures import PLAIN, Figure
from tools.bench.measure import settle, take_turns
from tools.bench.plain import Model

Params = Mapping[str, Tensor]
Step = Callable[[], object]


class StackedStep:
    """One SGD step of `at.clients` clients with a batch each; a call computes all of them at once."""

    def __init__(self, model: str, at: Scale) -> None:
        net = Model(ClientStore.of(workloads.work_a(model=model, clients=2, samples=40))).to(at.device)
        replace_all_batch_norm_modules_(net)
        self.clients = at.clients
        self.params = {
            name: t.detach().expand(at.clients, *t.shape).clone() for name, t in net.named_parameters()
        }
        self.x = torch.rand(at.clients, BATCH, 3, 32, 32, device=at.device)
        self.y = torch.randint(0, workloads.CLASSES, (at.clients, BATCH), device=at.device)

        def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(net, dict(params), (x,)), y)

        def each(params: Params, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            gradients = grad(loss)(params, x, y)
            return {name: params[name] - workloads.LR * g for name, g in gradients.items()}

        self._each, self._together = each, vmap(each)

    def __call__(self) -> dict[str, Tensor]:
        return self._together(self.params, self.x, self.y)

    def single(self, place: int) -> dict[str, Tensor]:
        """The step of one client."""
        return self._each({name: t[place] for name, t in self.params.items()}, self.x[place], self.y[place])

    def one_by_one(self) -> None:
        """The same step client by client."""
        for place in range(self.clients):
            self.single(place)

    def compiled(self, backend: str) -> Step:
        """The same step compiled by torch.compile, at its first call."""
        return partial(torch.compile(self._together, backend=backend), self.params, self.x, self.y)


def figures(turns: int, at: Scale) -> Iterator[Figure]:
    """One figure per model."""
    for model in at.models:
        yield compared(model, turns, at)


def compared(model: str, turns: int, at: Scale) -> Figure:
    """All ways to compute a step; the notes hold each way's peak memory, or why it is not supported."""
    step = StackedStep(model, at)
    compiled = step.compiled(at.backend)
    ways: dict[str, Callable[[], Step]] = {
        PLAIN: lambda: step.one_by_one,
        "stacked": lambda: step,
        "compiled": lambda: compiled,
    }
    if at.real:
        ways |= {"graph": lambda: graph(step), "compiled graph": lambda: graph(compiled)}
    notes: dict[str, float | str] = {}
    ready: dict[str, Step] = {}
    with fastest_kernels():
        for name, prepare in ways.items():
            forget_peak(at.device)
            try:
                ready[name] = way = prepare()
                way()
                settle(at.device)
            except Exception as error:
                ready.pop(name, None)
                notes[name] = f"failed: {(str(error).splitlines() or [''])[0]}"
            else:
                notes[f"{name}, peak MB"] = peak_mb(at.device)
        times = take_turns({name: repeated(way, at) for name, way in ready.items()}, turns)
    best = min((name for name in times if name != PLAIN), key=lambda name: times[name].median)
    what = f"{at.steps} steps of {at.clients} clients, {model}; best: {best}"
    return Figure(f"step {model}", what, sides=times, ours=best, notes=notes)


@contextmanager
def fastest_kernels() -> Iterator[None]:
    """Let cuDNN search for its fastest kernels in the block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def repeated(way: Step, at: Scale) -> Callable[[], None]:
    """`at.steps` calls, until their end on the device."""

    def several() -> None:
        for _ in range(at.steps):
            way()
        settle(at.device)

    return several


def graph(step: Step) -> Step:
    """Capture a step after some runs on a separate stream, as torch requires -> its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured.replay
