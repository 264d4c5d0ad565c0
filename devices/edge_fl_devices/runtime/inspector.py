"""Measure the board and count the data of a device, in a child."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.fields import Tier
from edge_fl.wire.messages import Capability
from edge_fl_devices.board import capability as capabilities
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.features.child_loader import ChildFeatureLoader, Inspection
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.remote.log_file import LOCAL
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.monitor import COUNTING, MEASURED, counted

log = logging.getLogger(__name__)

UNKNOWN_OPSET = 99  # of a board that is not measured: the canary tells what it runs


def inspect_board(config: DeviceConfig, loader: ChildFeatureLoader) -> tuple[Inspection | None, str]:
    """Measure the board in a child, without its data: what takes longer with every picture would delay the start.

    Returns None and a failure word if the child failed; the monitor tries again.
    """
    try:
        return loader.inspect_board(), ""
    except (EdgeFLError, MemoryError) as error:
        log.warning("%s: the board was not measured: %s; head-only until it is", config.id, error)
        return None, record.failure_word(error)


def measured(config: DeviceConfig, board: Inspection | None) -> Capability:
    """Return what this machine can do; a board that could not be measured is head-only until then.

    Raises ConfigError if its owner demands more than it can do.
    """
    limit = None if config.tier == "auto" else Tier(config.tier)
    if board is None:
        found = capabilities.measure(folder=Path(config.folder), head=config.head, limit=Tier.HEAD)
        return replace(found, notes=["head: the board is not measured yet", "not measured"])
    capability = capabilities.measure(
        folder=Path(config.folder),
        head=config.head,
        limit=limit,
        onnxruntime=board.runtime.version,
        max_opset=board.runtime.max_opset,
        gflops=board.speed.gflops,
        torch_s=board.speed.torch_s,
    )
    if config.tier == "full" and capability.tier != "full":
        raise ConfigError(
            f"tier full: not on this machine ({capability.notes[0]}); expected torch and enough memory"
        )
    return replace(capability, notes=[*capability.notes, board.measured])


def as_counted_last(config: DeviceConfig, capability: Capability) -> Capability:
    """Add the last count of the data; the monitor counts them once the agent runs."""
    known = counted(capability, record.read(Path(config.folder)).report)
    return replace(known, notes=[*capability.notes, COUNTING])


class Board:
    """The board of a device as last measured. `use_tier` gets ready for what its tier does."""

    def __init__(
        self, config: DeviceConfig, found: Inspection | None, use_tier: Callable[[str], None]
    ) -> None:
        self._config, self._use_tier = config, use_tier
        self.capability = measured(config, found)
        opset = self.capability.max_opset or UNKNOWN_OPSET
        self._runtime = Runtime(self.capability.onnxruntime, opset)
        use_tier(self.capability.tier)

    def runtime(self) -> Runtime:
        """Return the board's onnxruntime."""
        return self._runtime

    def measure_again(self, found: Inspection) -> Capability:
        """Take the measurements of a board that could not be measured at the start."""
        self.capability, self._runtime = measured(self._config, found), found.runtime
        self._use_tier(self.capability.tier)
        return self.capability


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
