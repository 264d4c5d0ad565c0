"""Head-only devices in a run whose method shares no extractor: they get "rest" with `why` "no_extractor", which their state repeats."""

from __future__ import annotations

import logging

from edge_fl.capability import Tier
from edge_fl_server.mqtt.devices.roster import Device
from edge_fl_server.mqtt.session import Server

log = logging.getLogger(__name__)

WHY = "no_extractor"


def rest_head_devices(server: Server, run_id: str, method_title: str) -> None:
    """Assign "rest" to every head-only device of a connected server, now and when another one becomes ready."""

    def assign_rest(device: Device) -> None:
        if device.tier is not Tier.HEAD or not device.ready:
            return
        assignment = server.assignments.current(device.id)
        if assignment is None or assignment.why != WHY:
            log.warning(
                "%s: head-only, not supported: %s shares no extractor",
                device.id,
                method_title,
                extra={"device": device.id},
            )
            server.assignments.assign(device.id, "rest", run_id=run_id, id=f"{run_id}-unsupported", why=WHY)

    server.roster.on_change(lambda before, now: assign_rest(now))
    for device in server.roster.table.values():
        assign_rest(device)
