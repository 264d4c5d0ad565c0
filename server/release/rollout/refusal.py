"""What head-only devices hear when a run's method shares no extractor: that there is nothing for them, and why.

Each that is there, or comes, is told to rest with the word `no_extractor`, which it repeats in its own state.
"""

from __future__ import annotations

import logging

from edge_fl.capability import Tier
from server.mqtt.devices.assignments import Assignments
from server.mqtt.devices.roster import Device, Roster

log = logging.getLogger(__name__)

WHY = "no_extractor"


class Refusal:
    """Made instead of a rollout, after the link is open."""

    def __init__(self, roster: Roster, assignments: Assignments, run_id: str, title: str) -> None:
        self._assignments, self._run_id, self._title = assignments, run_id, title
        roster.on_change(lambda before, now: self._tell(now))
        for device in roster.table.values():
            self._tell(device)

    def _tell(self, device: Device) -> None:
        if device.tier is not Tier.HEAD or not device.ready:
            return
        assignment = self._assignments.current(device.id)
        if assignment is None or assignment.why != WHY:
            log.warning(
                "%s: head-only, refused: %s shares no extractor",
                device.id,
                self._title,
                extra={"device": device.id},
            )
            self._assignments.ask(
                device.id, "rest", run_id=self._run_id, id=f"{self._run_id}-refused", why=WHY
            )
