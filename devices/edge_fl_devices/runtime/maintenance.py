"""What a running agent is checked for a few times a second: its certificate, the operator's settings, and what it shows on its terminal."""

import math
import time
from collections.abc import Callable

from msgspec.structs import replace

from edge_fl.console.progress import Count, Progress
from edge_fl.errors import ConnectError
from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.features.child_loader import ReadingProgress
from edge_fl_devices.remote.settings import RemoteSettings
from edge_fl_devices.runtime.certificates import CertificateExpiry
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner

CONNECT_S = 15.0
READING_S = 60.0  # between lines about a slow reading of the pictures


def report_waiting(agent: Device, show: Callable[[str], None]) -> None:
    """Report every CONNECT_S that the broker cannot be reached, until it is."""
    while True:
        try:
            agent.connection.wait(CONNECT_S)
        except ConnectError as error:
            if agent.denied or agent.state.status == "disconnected":
                return
            show(f"{error}; trying again")
        else:
            return


class StatusDisplay:
    """Prints each new status, shows the progress of downloads, and prints that of a slow reading of the pictures."""

    def __init__(self, agent: Device, progress: Progress, reading: ReadingProgress) -> None:
        self._agent, self._progress, self._reading = agent, progress, reading
        self._line = ""
        self._reading_at_s = -math.inf
        self._fetching: Count | None = None

    def update(self) -> None:
        """Show what has changed."""
        before, self._fetching = self._fetching, self._agent.fetching
        if before and (self._fetching is None or self._fetching.stage != before.stage):
            self._progress(before._replace(done=before.of))
        if self._fetching:
            self._progress(self._fetching)
        if (reading := self._reading.current) and reading.at_s - self._reading_at_s >= READING_S:
            self._reading_at_s = reading.at_s
            self._progress.print(f"{self._agent.name}: {reading}")
        if self._agent.state.published is None:
            return
        status, activity, release, why = self._agent.state.published
        line = f"{self._agent.name}: {status}, {activity}"
        line += (f", release {release}" if release else "") + (f" ({why})" if why else "")
        if line != self._line:
            self._progress.print(line)
            self._line = line


class Maintenance:
    """Call it as `done` of `Runner.run`. `renew` renews the certificate when that is due."""

    def __init__(
        self,
        agent: Device,
        runner: Runner,
        settings: RemoteSettings,
        expiry: CertificateExpiry,
        renew: Callable[[], None],
        display: StatusDisplay,
    ) -> None:
        self._agent, self._runner, self._settings = agent, runner, settings
        self._expiry, self._renew, self._display = expiry, renew, display

    def __call__(self) -> bool:
        """Return whether the agent must end: the broker denies access, or it starts anew with other settings."""
        agent, state = self._agent, self._agent.state
        self._renew()
        self._display.update()
        if (until := self._expiry.end()) != state.capability.certificate_until:  # renewed
            changed = replace(state.capability, certificate_until=until)
            self._runner.deliver(agent, DataChanged(changed, state.data_problem, refit=False))
        denied = bool(agent.denied)
        self._settings.observe(state.connected, denied, time.monotonic())
        if self._settings.restart_due and (denied or state.work is None):
            self._runner.hand_over()
        return self._runner.continues or denied
