"""Connect agent updates (`edge_fl_devices.update`) with the running agent: its connection, its status, its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from edge_fl import threads
from edge_fl.release.agent import UpdateStatus
from edge_fl.wire.transport import Event, Listener, Packet, Transport
from edge_fl_devices.agent.events import UpdateChanged
from edge_fl_devices.agent.state import Phase
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.interfaces import DeviceConnect
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.update.state import RESTART, Updates
from edge_fl_devices.update.transfers import Transfers

END_S = 5.0


@dataclass
class Updating:
    """`exit_code` of the agent: RESTART after a switch, else 0. `listen` receives all events of the device's connection."""

    exit_code: int = 0
    listen: Callable[[Event], None] = lambda event: None

    def through(self, connect: DeviceConnect) -> DeviceConnect:
        """Connect with `connect`, and listen."""

        def listening(name: str, will: Packet | None, deliver: Listener, /) -> Transport:
            def both(event: Event) -> None:
                self.listen(event)
                deliver(event)

            return connect(name, will, both)

        return listening


@contextmanager
def updating(config: DeviceConfig, device: Device, runner: Runner, trust: Trust) -> Iterator[Updating]:
    """Update the software of a device that is not connected yet, while the block runs; not without a launcher."""
    updates, result = Updates.of_environment(), Updating()
    if updates is None:
        yield result
        return
    from edge_fl_devices.update.updater import AgentUpdater

    def restart() -> None:
        result.exit_code = RESTART
        runner.stop()

    def report(status: UpdateStatus) -> None:
        runner.deliver(device, UpdateChanged(status))

    updater = AgentUpdater(
        updates,
        Path(config.folder),
        config.update,
        ready=lambda serves: device.state.phase is Phase.UP and bool(device.state.release or not serves),
        serves=lambda: bool(device.state.release),
        report=report,
        restart=restart,
    )
    capability = msgspec.structs.replace(device.state.capability, update=updater.status)
    device.state = replace(device.state, capability=capability)
    transfers = Transfers(device.name, device.state.topics, device.carry_out)
    device.desire_update = updater.desire
    result.listen = transfers.put
    stopped = threading.Event()
    thread = threads.lasting(
        partial(updater.run, transfers, trust, stopped), "edge-fl-updates", stopped=stopped
    )
    thread.start()
    try:
        yield result
    finally:
        stopped.set()
        transfers.close()
        thread.join(END_S)
