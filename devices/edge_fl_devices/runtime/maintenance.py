"""What a running agent is checked for a few times a second: its certificate, the operator's settings, and its display."""

import time
from collections.abc import Callable

from msgspec.structs import replace

from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.remote.settings import RemoteSettings
from edge_fl_devices.runtime.certificates import CertificateExpiry
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.runtime.status_display import StatusDisplay


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
