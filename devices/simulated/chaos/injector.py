"""Brings the chaos of a profile into a fleet: links that are bad, and machines that go down and come back when the timeline says so.

It is asked from the runner's thread and takes no decision of its own: all of them stand in the profile and follow from the seed.
"""

from __future__ import annotations

import heapq
import logging
import math
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from devices.runtime.device import Device
from devices.runtime.interfaces import DeviceConnect
from devices.runtime.runner import Runner
from devices.simulated.chaos.faulty_transport import FaultyTransport
from devices.simulated.chaos.profile import Chaos, Restarts
from devices.simulated.chaos.timeline import Outage, skew_s, timeline
from edge_fl.errors import ConfigError
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.transport import Listener, Packet, Transport

log = logging.getLogger(__name__)

COMMAND_S = 30.0
Restart = Callable[[float], None]
"""Takes a machine down for so many seconds; returns at once."""


class FaultInjector:
    """`make` starts a device anew, by its name; `restarts` are what takes the broker or the server down, where commands do not."""

    def __init__(
        self,
        chaos: Chaos,
        names: Sequence[str],
        connect: DeviceConnect,
        restarts: Mapping[str, Restart] | None = None,
    ) -> None:
        self.chaos = chaos
        self.happened: list[Outage] = []
        self._inner = connect
        self._links: dict[str, FaultyTransport] = {}
        self._due = timeline(chaos, names)
        self._absent: list[tuple[float, str]] = []
        self._dead: dict[str, Device] = {}
        self._gone: set[str] = set()
        self._began_s = math.inf
        self._restarts = {"broker": self.cut_all, **_commanded(chaos), **(restarts or {})}
        if chaos.server.restarts and "server" not in self._restarts:
            raise ConfigError(
                "[server] restarts: a fleet cannot restart its server without [server] stop and start"
            )
        self._loop = MqttLoop()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen, and everybody is back who comes back."""
        return not self._due and not self._absent

    def connect(self, client_id: str, will: Packet | None, deliver: Listener, /) -> Transport:
        """As `DeviceConnect`, through a bad link."""
        chaos = self.chaos
        link = FaultyTransport(self._inner, chaos.link, chaos.seed, self._loop, client_id, will, deliver)
        self._links[client_id] = link
        return link

    def clock(self, name: str) -> Callable[[], datetime]:
        """The wall clock of a device."""
        off = timedelta(seconds=max(min(skew_s(self.chaos, name), 2e9), -1.5e9))
        return lambda: datetime.now(UTC) + off

    def advance(self, runner: Runner, make: Callable[[str], Device]) -> None:
        """Lets happen what is due; on the runner's thread."""
        now_s = time.monotonic()
        self._began_s = min(self._began_s, now_s)
        while self._due and self._began_s + self._due[0].at_s <= now_s:
            self._let(self._due.pop(0), runner, now_s)
        while self._absent and self._absent[0][0] <= now_s:
            _, name = heapq.heappop(self._absent)
            if runner.is_working(self._dead[name]):
                # what a worker is at cannot be killed, so the crash is after it
                heapq.heappush(self._absent, (now_s + 0.1, name))
                break
            del self._dead[name]
            runner.add(make(name), self.connect)

    def cut_all(self, for_s: float) -> None:
        """Cuts every device's link for so long, as a broker that goes down does."""
        for link in self._links.values():
            link.cut(for_s)

    def close(self) -> None:
        """No link lives on."""
        self._loop.close()

    def _let(self, outage: Outage, runner: Runner, now_s: float) -> None:
        self.happened.append(outage)
        log.info("chaos: %s", outage)
        match outage.what:
            case "crash":
                self._crash(outage, runner, now_s)
            case "cut" if outage.who in self._links:
                self._links[outage.who].cut(outage.for_s)
            case "broker" | "server":
                self._restarts[outage.what](outage.for_s)

    def _crash(self, outage: Outage, runner: Runner, now_s: float) -> None:
        name = outage.who
        device = next((found for found in runner.devices if found.name == name), None)
        if math.isinf(outage.for_s):
            self._gone.add(name)
            self._absent = [(at_s, absent) for at_s, absent in self._absent if absent != name]
            heapq.heapify(self._absent)
        if device is None:  # it is down already
            return
        runner.crash(device)
        if name not in self._gone:
            self._dead[name] = device
            heapq.heappush(self._absent, (now_s + outage.for_s, name))


def _commanded(chaos: Chaos) -> dict[str, Restart]:
    machines: dict[str, Restarts] = {"broker": chaos.broker, "server": chaos.server}
    return {name: _Commands(name, found) for name, found in machines.items() if found.stop and found.start}


class _Commands:
    """Restarts a machine by commands, on a thread of its own."""

    def __init__(self, name: str, commands: Restarts) -> None:
        self._name, self._commands = name, commands

    def __call__(self, for_s: float) -> None:
        threading.Thread(
            target=self._run, args=(for_s,), name=f"edge-fl-restart-{self._name}", daemon=True
        ).start()

    def _run(self, for_s: float) -> None:
        self._carry_out(self._commands.stop)
        time.sleep(for_s)
        self._carry_out(self._commands.start)

    def _carry_out(self, command: list[str]) -> None:
        try:
            subprocess.run(command, check=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            log.error("chaos: %s: %s", self._name, error)
