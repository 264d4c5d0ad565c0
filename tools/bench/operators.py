"""The operators of a local update on one thread: their time, and the share of the GEMM peak that those with most arithmetic reach."""

from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl_server.training.engines.processes import keep_memory, threads
from edge_fl_server.training.studies import ClientStore, Study
from tools.bench import workloads
from tools.bench.figures import Figure
from tools.bench.measure import gemm_peak, products, take_turns


def limiting(turns: int) -> Figure:
    """The limiting operator of A1's step."""
    return of_step(workloads.work_a(), turns)


def of_step(study: Study, turns: int) -> Figure:
    """The operator that takes most of the time of the largest client's local update: its share of the GEMM peak of one thread, in %.

    The notes have the milliseconds per step of the operators that take most of the time.
    """
    store, method = ClientStore.of(study), build_method(study.spec).at(1)
    client = store[max(store, key=store.samples)]
    down, own = steps.broadcast(method, steps.start(method), client.id), steps.start_own(method, client.id)

    def update() -> None:
        client.train(method, 1, down, own)

    keep_memory()
    with threads(1):
        update()
        with FlopCounterMode(display=False) as counter:
            update()
        peak = gemm_peak(take_turns({"": products()}, turns)[""])
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(turns):
                update()
    flop = {
        str(name).replace(".", "::"): count for name, count in counter.get_flop_counts()["Global"].items()
    }
    events = {event.key: event for event in profiler.key_averages()}
    seconds = {name: events[name].cpu_time_total / 1e6 / turns for name in flop if name in events}
    slowest = max(seconds, key=seconds.__getitem__)
    reached = flop[slowest] / seconds[slowest] / 1e9
    batches = -(-store.samples(client.id) // client.batch_size)
    most = sorted(events.values(), key=lambda event: -event.self_cpu_time_total)[:5]
    notes: dict[str, float | str] = {
        f"{event.key}, ms a step": round(event.self_cpu_time_total / 1e3 / turns / batches, 2)
        for event in most
    }
    notes |= {"GFLOP/s": round(reached, 1), "GEMM peak of one thread": round(peak, 1)}
    what = f"{slowest}, share of the GEMM peak of one thread"
    return Figure("A1 limit", what, 65.0, " %", value=100 * reached / peak, notes=notes)
