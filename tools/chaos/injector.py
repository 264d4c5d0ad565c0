"""Inject the faults of a chaos profile into a fleet: bad connections, and outages according to the timeline.

Every fault follows from the profile and its seed. `FaultInjector.advance` runs on the runner's thread.
"""

import heapq
import logging
import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from edge_fl import threads
from edge_fl.errors import ConfigError
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.transport import Connect, Listener, Packet, Transport
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from tools.chaos.faulty_transport import FaultyTransport
from tools.chaos.profile import Chaos, Restarts
from tools.chaos.timeline import Outage, skew_s, timeline

log = logging.getLogger(__name__)

COMMAND_S = 30.0
Restart = Callable[[float], None]
"""Takes a machine down for this many seconds; returns at once."""


class FaultInjector:
    """Faults of one fleet; `restarts` take the broker or the server down where the profile has no commands for it."""

    def __init__(
        self,
        chaos: Chaos,
        names: Sequence[str],
        connect: Connect,
        restarts: Mapping[str, Restart] | None = None,
    ) -> None:
        self.chaos = chaos
        self.happened: list[Outage] = []
        self._connect = connect
        self._connections: dict[str, FaultyTransport] = {}
        self._due = timeline(chaos, names)
        self._restart_at: list[tuple[float, str]] = []
        self._crashed: dict[str, Device] = {}
        self._left: set[str] = set()
        self._started_s = math.inf
        self._restarts = {"broker": self.cut_all, **_commanded(chaos), **(restarts or {})}
        if chaos.server.restarts and "server" not in self._restarts:
            raise ConfigError(
                "[server] restarts: a fleet cannot restart its server without [server] stop and start"
            )
        self._loop = MqttLoop()

    @property
    def is_over(self) -> bool:
        """Whether no fault is left and all crashed devices have restarted."""
        return not self._due and not self._restart_at

    def connect(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport:
        """Connect through a `FaultyTransport`; a `Connect`."""
        faults, seed = self.chaos.link, self.chaos.seed
        transport = FaultyTransport(self._connect, faults, seed, self._loop, client_id, will, deliver)
        self._connections[client_id] = transport
        return transport

    def clock(self, name: str) -> Callable[[], datetime]:
        """Return the skewed wall clock of a device."""
        skew = timedelta(seconds=max(min(skew_s(self.chaos, name), 2e9), -1.5e9))
        return lambda: datetime.now(UTC) + skew

    def advance(self, runner: Runner, make: Callable[[str], Device]) -> None:
        """Start the outages that are due, and restart crashed devices with `make(name)`."""
        now_s = time.monotonic()
        self._started_s = min(self._started_s, now_s)
        while self._due and self._started_s + self._due[0].at_s <= now_s:
            self._begin(self._due.pop(0), runner, now_s)
        while self._restart_at and self._restart_at[0][0] <= now_s:
            _, name = heapq.heappop(self._restart_at)
            if runner.is_working(self._crashed[name]):
                # a running job cannot be killed, so the device restarts after it
                heapq.heappush(self._restart_at, (now_s + 0.1, name))
                break
            del self._crashed[name]
            runner.add(make(name), self.connect)

    def cut_all(self, duration_s: float) -> None:
        """Cut all connections, as a broker outage does."""
        for transport in self._connections.values():
            transport.cut(duration_s)

    def close(self) -> None:
        """Stop all connections."""
        self._loop.close()

    def _begin(self, outage: Outage, runner: Runner, now_s: float) -> None:
        self.happened.append(outage)
        log.info("chaos: %s", outage)
        match outage.kind:
            case "crash":
                self._crash(outage, runner, now_s)
            case "cut" if outage.target in self._connections:
                self._connections[outage.target].cut(outage.duration_s)
            case "broker" | "server":
                self._restarts[outage.kind](outage.duration_s)

    def _crash(self, outage: Outage, runner: Runner, now_s: float) -> None:
        name = outage.target
        device = next((device for device in runner.devices if device.name == name), None)
        if math.isinf(outage.duration_s):
            self._left.add(name)
            self._restart_at = [(at_s, other) for at_s, other in self._restart_at if other != name]
            heapq.heapify(self._restart_at)
        if device is None:  # down already
            return
        runner.crash(device)
        if name not in self._left:
            self._crashed[name] = device
            heapq.heappush(self._restart_at, (now_s + outage.duration_s, name))


def _commanded(chaos: Chaos) -> dict[str, Restart]:
    machines: dict[str, Restarts] = {"broker": chaos.broker, "server": chaos.server}
    return {name: partial(_restart, name, own) for name, own in machines.items() if own.stop and own.start}


def _restart(machine: str, commands: Restarts, down_s: float) -> None:
    """Run the stop command and, `down_s` later, the start command on a thread of their own."""

    def run() -> None:
        for command, wait_s in ((commands.stop, down_s), (commands.start, 0.0)):
            try:
                subprocess.run(command, check=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
            except (OSError, subprocess.SubprocessError) as error:
                log.error("chaos: %s: %s", machine, error)
            time.sleep(wait_s)

    threads.once(run, f"edge-fl-restart-{machine}").start()
