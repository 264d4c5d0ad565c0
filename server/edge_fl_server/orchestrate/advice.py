"""What a run tells its operator about devices that get nothing from it, or that a run without rounds cannot show otherwise."""

import logging
import time

import msgspec

from edge_fl.console.progress import Progress
from edge_fl.data.class_names import OUTSIDE
from edge_fl.errors import shortened
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl_server.mqtt.devices.roster import RosterDevice
from edge_fl_server.mqtt.session import Server
from edge_fl_server.recipes.recipe import BrokerConfig, Recipe
from edge_fl_server.runs.totals import RunTotals

log = logging.getLogger(__name__)

COUNT_S = 2.0  # devices report their pictures soon after their heads
MAX_NAMES = 8  # devices named in one message


class Advice:
    """Lines about a run's devices; all but the pictures outside of classes are for a run that trains nothing."""

    def __init__(self, recipe: Recipe, server: Server, totals: RunTotals, progress: Progress) -> None:
        self._recipe, self._server, self._totals, self._progress = recipe, server, totals, progress

    def idle_devices(self) -> None:
        """Print the full devices of a run that trains nothing."""
        if self._recipe.source == "none" and (idle := self._server.roster.full_devices()):
            self._progress.print(
                f"full devices are online: {shortened(idle, MAX_NAMES)}; they receive nothing from source 'none'."
                " To fit heads on them, start them with 'edge-fl device run --tier head'"
            )

    def pictures_outside(self) -> None:
        """Print which devices have pictures in folders that are no class."""
        if self._recipe.source == "none":
            time.sleep(COUNT_S)
        for id, device in sorted(self._server.roster.table.items()):
            notes = device.capability.notes if device.capability else []
            if found := [note for note in notes if OUTSIDE in note]:
                self._progress.print(f"{id}: {'; '.join(found)}; its own log names the folder")

    def accuracies(self) -> None:
        """Print what each device measured with its head: a run without rounds prints no other accuracy."""
        if self._recipe.source != "none":
            return
        for row in self._totals.rows({})[:MAX_NAMES]:
            if row.after is not None:
                self._progress.print(
                    f"{row.device}: accuracy {row.after:.3f} ({row.samples} labelled images)"
                )
        given = msgspec.to_builtins(self._recipe.broker).items()
        options = [f" --{name} {value}" for name, value in given if value != getattr(BrokerConfig(), name)]
        self._progress.print(
            f"devices that come later are served while 'edge-fl server up{''.join(options)}' runs"
        )


def rest_heads(server: Server, run_id: str, title: str) -> None:
    """Assign "rest" to head-only devices, also to those that come later: the method `title` shares no extractor."""

    def rest(device: RosterDevice) -> None:
        if device.tier is not Tier.HEAD or not device.ready:
            return
        current = server.assignments.current(device.id)
        if current is None or current.why != Failure.NO_EXTRACTOR:
            text = "%s: head-only, not supported: %s shares no extractor"
            log.warning(text, device.id, title, extra={"device": device.id})
            id, why = f"{run_id}-unsupported", Failure.NO_EXTRACTOR
            server.assignments.assign(device.id, "rest", run_id=run_id, id=id, why=why)

    server.roster.on_change(lambda before, now: rest(now))
    for device in server.roster.table.values():
        rest(device)
