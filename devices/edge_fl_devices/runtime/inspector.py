"""Count the data of a device in a child, for its monitor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec.structs import replace

from edge_fl.wire.messages import Capability
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.features.child_loader import ChildFeatureLoader, Inspection
from edge_fl_devices.remote.log_file import LOCAL
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.monitor import MEASURED, counted

log = logging.getLogger(__name__)


class Inspector:
    """Counts the data of `device`; `measured` takes the first measurements of a board that could not be measured at the start.

    `show` takes one line about the first count.
    """

    def __init__(
        self,
        config: DeviceConfig,
        device: Device,
        loader: ChildFeatureLoader,
        measured: Callable[[Inspection], Capability],
        show: Callable[[str], None],
    ) -> None:
        self._config, self._device, self._loader = config, device, loader
        self._measured, self._show = measured, show
        self._first = True

    def __call__(self, snapshot: Snapshot) -> Capability:
        """See `edge_fl_devices.runtime.monitor.Inspect`."""
        inspection, capability = self._loader.inspect(snapshot), self._device.state.capability
        if not capability.max_opset:
            found = self._measured(inspection)
            capability = replace(
                capability,
                tier=found.tier,
                onnxruntime=found.onnxruntime,
                max_opset=found.max_opset,
                notes=found.notes,
            )
        notes = [capability.notes[0], inspection.measured, *capability.notes[MEASURED:]]
        capability = replace(capability, notes=notes)
        if inspection.report is None:
            log.warning("%s: %s", self._config.id, inspection.trouble, extra=LOCAL)
            capability = replace(capability, notes=notes[:MEASURED])
        else:
            for line in inspection.report.local_notes:
                log.warning("%s: %s", self._config.id, line, extra=LOCAL)
            capability = counted(capability, inspection.report)
        if self._first:
            self._show(f"{self._config.id}: {capability.samples} samples to train on")
            self._first = False
        return capability
