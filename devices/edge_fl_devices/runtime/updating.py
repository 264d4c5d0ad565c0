"""Connect agent updates (`edge_fl_devices.update`) with the running agent: its connection, its status, its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge_fl import threads
from edge_fl.release.agent import AgentUpdate, UpdateStatus
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connect, Event, Listener, Packet, Transport
from edge_fl_devices.agent.effects import Effect
from edge_fl_devices.agent.events import UpdateChanged
from edge_fl_devices.agent.state import AgentState, Phase
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.update.launcher import RESTART
from edge_fl_devices.update.state import Updates
from edge_fl_devices.update.transfers import Transfers

if TYPE_CHECKING:
    from edge_fl_devices.update.updater import AgentUpdater

END_S = 5.0


class Updating:
    """The updates of the agent's software; without a launcher there are none.

    state: of the running agent. carry_out: subscribes and publishes. report: takes the events for the agent. stop: ends the agent.
    exit_code: of the process; RESTART after a switch, else 0.
    """

    def __init__(
        self,
        config: DeviceConfig,
        trust: Trust,
        state: Callable[[], AgentState],
        carry_out: Callable[[Iterable[Effect]], None],
        report: Callable[[UpdateChanged], None],
        stop: Callable[[], None],
    ) -> None:
        self.exit_code = 0
        self._trust, self._state, self._report, self._stop = trust, state, report, stop
        self._transfers = Transfers(config.id, Topics(config.broker.fleet), carry_out)
        self._updater: AgentUpdater | None = None
        if updates := Updates.of_environment():
            from edge_fl_devices.update.updater import AgentUpdater

            self._updater = AgentUpdater(
                updates,
                Path(config.folder),
                config.update,
                ready=self._is_ready,
                serves=lambda: bool(self._state().release),
                report=lambda status: self._report(UpdateChanged(status)),
                restart=self._restart,
            )

    @property
    def status(self) -> UpdateStatus | None:
        """The status of the last update; None without a launcher."""
        return self._updater.status if self._updater else None

    def desire(self, update: AgentUpdate | None) -> None:
        """Take the update that the server desires."""
        if self._updater:
            self._updater.desire(update)

    def through(self, connect: Connect) -> Connect:
        """Connect with `connect`, and listen."""

        def listening(name: str, will: Packet | None, deliver: Listener, /) -> Transport:
            def both(event: Event) -> None:
                self._transfers.put(event)
                deliver(event)

            return connect(name, will, both)

        return listening

    @contextmanager
    def running(self) -> Iterator[None]:
        """Update while the block runs."""
        if self._updater is None:
            yield
            return
        stopped = threading.Event()
        run = partial(self._updater.run, self._transfers, self._trust, stopped)
        thread = threads.lasting(run, "edge-fl-updates", stopped=stopped)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            self._transfers.close()
            thread.join(END_S)

    def _is_ready(self, serves: bool) -> bool:
        state = self._state()
        return state.phase is Phase.UP and bool(state.release or not serves)

    def _restart(self) -> None:
        self.exit_code = RESTART
        self._stop()
