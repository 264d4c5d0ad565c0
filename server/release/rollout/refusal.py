"""What head-only devices hear when a run's method shares no extractor: that there is nothing for them, and why.

Each that is there, or comes, is told to rest with the word `no_extractor`, which it repeats in its own state.
"""

from __future__ import annotations

import logging

from edge_fl.capability import Tier
from server.mqtt.devices.assignments import Wants
from server.mqtt.devices.roster import Device, Roster

log = logging.getLogger(__name__)

WHY = "no_extractor"


class Refusal:
    """Made instead of a rollout, after the link is open."""

    def __init__(self, roster: Roster, wants: Wants, task: str, title: str) -> None:
        self._wants, self._task, self._title = wants, task, title
        roster.on_change(lambda before, now: self._tell(now))
        for device in roster.table.values():
            self._tell(device)

    def _tell(self, device: Device) -> None:
        if device.tier is not Tier.HEAD or not device.ready:
            return
        want = self._wants.current(device.id)
        if want is None or want.why != WHY:
            log.warning(
                "%s: head-only, refused: %s shares no extractor",
                device.id,
                self._title,
                extra={"device": device.id},
            )
            self._wants.ask(device.id, "rest", task=self._task, id=f"{self._task}-refused", why=WHY)
