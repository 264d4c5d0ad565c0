"""Run a fleet of simulated devices: many agents of both tiers in one process, over a real broker, with the code of real devices.

Device i owns the data of client i of a partition. The full devices are drawn from the seed; the head-only ones use the kinds of heads in
turn. Faults may be added from outside: bad connections, wrong clocks, and crashes after which devices restart on their own folders.
"""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from edge_fl.errors import ConfigError, ConnectError
from edge_fl.files import descriptors
from edge_fl.wire.transport import Listener, Packet, Transport
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.interfaces import DeviceConnect
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.simulated.device_factory import DeviceFactory
from edge_fl_devices.simulated.fleet_config import FleetConfig
from edge_fl_devices.simulated.fleet_status import DeviceResult, device_result
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.worker import MakeWorker

CHECK_S = 0.25e-3  # time per device to check the end condition and to show the progress
INJECT_S = 0.25  # interval at which faults are injected


class Faults(Protocol):
    """Faults of a fleet: they wrap its connections, change its clocks, and act on its devices (`simulated.chaos.injector`)."""

    @property
    def is_over(self) -> bool: ...
    def connect(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport: ...
    def clock(self, name: str) -> Callable[[], datetime]: ...
    def advance(self, runner: Runner, make: Callable[[str], Device]) -> None: ...
    def close(self) -> None: ...


def run_fleet(
    config: FleetConfig,
    connect: DeviceConnect,
    *,
    full_worker: MakeWorker | None = None,
    show: Callable[[Sequence[Device]], None] = lambda devices: None,
    on_start: Callable[[Runner], None] = lambda runner: None,
    every_s: float = 0.5,
    faults: Callable[[Sequence[str], DeviceConnect], Faults] | None = None,
) -> list[DeviceResult]:
    """Run the fleet until it ends; return the devices' results, sorted by name.

    `full_worker` is `workers.full.FullWorker`, a parameter so that head-only fleets do not import torch. `show` is called with the
    devices every `every_s`, `on_start` with the runner, which can be stopped, `faults` with the devices' names and `connect`.
    Raises ConnectError when the broker is not reached within `wait_s` or denies access.
    """
    if config.full and full_worker is None:
        raise ConfigError(f"{config.full} full devices, but no worker that trains; expected full_worker")
    fitter, runner = ChildFitter(keep=True), Runner(workers=config.workers)
    factory = DeviceFactory(config, fitter, full_worker)
    names = factory.names
    descriptors.require(len(names), f"a fleet of {len(names)} devices")
    every_s = max(every_s, len(names) * CHECK_S)
    injector = faults(names, connect) if faults else None
    if injector:
        connect, every_s = injector.connect, min(every_s, INJECT_S)
    end = _EndCondition(runner, config)

    def make(name: str) -> Device:
        return factory(name, injector.clock(name)) if injector else factory(name)

    def done() -> bool:
        if injector:
            injector.advance(runner, make)
        show(runner.devices)
        return end.reached() and (injector is None or injector.is_over)

    on_start(runner)
    try:
        for number, name in enumerate(names):
            runner.add(make(name), connect)
            if number == 0:
                runner.devices[0].connection.wait(config.wait_s)
        runner.run(config.duration_s, done, every_s)
    finally:
        fitter.close()
        if injector:
            injector.close()
    if runner.devices and all(device.denied for device in runner.devices):
        raise ConnectError(
            f"fleet {config.fleet!r}: the broker denies access to every device ({runner.devices[0].denied})",
            consequence="the fleet stopped",
        )
    return [device_result(device) for device in sorted(runner.devices, key=lambda device: device.name)]


class _EndCondition:
    """Detects that a fleet with `until_idle` has nothing left to do, or that the broker denies access to all devices."""

    def __init__(self, runner: Runner, config: FleetConfig) -> None:
        self._devices, self._config = runner.devices, config
        self._server_seen = False
        self._busy_s = time.monotonic()

    def reached(self) -> bool:
        devices, now_s = self._devices, time.monotonic()
        if devices and all(device.denied for device in devices):
            return True
        if not self._config.until_idle:
            return False
        online = any(device.state.server_online for device in devices)
        self._server_seen = self._server_seen or online
        acknowledged = any(device.reporting.acknowledged.total() for device in devices)
        waiting = not acknowledged and (online or not self._server_seen)
        if waiting or not all(device.is_quiet or device.denied for device in devices):
            self._busy_s = now_s
        return now_s - self._busy_s >= (1.0 if acknowledged and not online else self._config.idle_s)
