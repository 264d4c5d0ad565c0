"""Create the devices of a simulated fleet, at the start and again after a simulated crash."""

import threading
from collections.abc import Callable
from datetime import datetime
from itertools import cycle
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edge_fl.data import datasets
from edge_fl.data.partition import split_clients
from edge_fl.data.samples import ClientData
from edge_fl.errors import ArtefactError, ConfigError, ProtocolError
from edge_fl.fields import Tier
from edge_fl.inputs import InputSpec
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics, checked
from edge_fl_devices.board import capability
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install import canary
from edge_fl_devices.install.trust import Trust, wall_clock
from edge_fl_devices.runtime import device
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.simulated.fleet_config import FleetConfig, full_devices, names
from edge_fl_devices.storage.slots import InstalledRelease
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import head_worker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_devices.workers.worker import MakeWorker, Worker

Clock = Callable[[], datetime]
"""Returns the wall clock of a device."""


class DeviceFactory:
    """Makes a device by its name; call it again to restart the device on its folder.

    The devices share what is the same for all of them: the machine's measured capability, the child processes that fit heads, and the
    verdict on an extractor. Raises ConfigError for an invalid fleet name.
    """

    def __init__(self, config: FleetConfig, fitter: ChildFitter, full_worker: MakeWorker | None) -> None:
        try:
            self._topics = Topics(checked(config.fleet, "fleet"))
        except ProtocolError as error:
            raise ConfigError(error.message) from error
        self._config, self._fitter, self._full_worker = config, fitter, full_worker
        self._dataset = datasets.load(config.data.dataset, Path(config.data.data_dir))
        self._split = split_clients(self._dataset, config.data, config.seed)
        if (clients := len(self._split.clients)) != config.data.clients:
            raise ConfigError(
                f"{config.data.split}: {clients} clients for {config.data.clients} devices; expected --devices {clients}"
            )
        self.names = config.ids or names(len(self._split.clients))
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._full = full_devices(len(self.names), config.full, config.seed)
        heads = (number for number in range(len(self.names)) if number not in self._full)
        self._kinds = dict(zip(heads, cycle(config.heads), strict=False))
        self._check = _CheckOnce(canary.require)
        self._machine = capability.measure(folder=config.folder, max_opset=runtime().max_opset)

    def __call__(self, name: str, clock: Clock = wall_clock) -> Device:
        number, config = self._numbers[name], self._config
        return device.start(
            name,
            self._topics,
            self._capability(number),
            self._worker(name, number, clock),
            limits=config.limits,
            identity=config.identities / name if config.identities else None,
        )

    def _worker(self, name: str, number: int, clock: Clock) -> Worker:
        store, limits = Store(self._config.folder / name), self._config.limits

        def data(classes: tuple[str, ...], input: InputSpec) -> ClientData:
            return self._split.client(self._dataset, self._split.clients[number])

        if self._full_worker and number in self._full:
            return self._full_worker(name, store, data, limits=limits)
        root = self._config.root
        return head_worker(
            name,
            store,
            FitSettings(self._kinds.get(number, "")),
            loader=LocalFeatureLoader(data, store.folder),
            fitter=self._fitter,
            runtime=runtime,
            trust=Trust(store.folder / "tuf", root, trust_on_first_use=root is None, clock=clock),
            # without certificates a signature by a root of first use proves nothing
            verifies=bool(root or self._config.identities),
            check=self._check,
            limits=limits,
        )

    def _capability(self, number: int) -> Capability:
        labels = self._dataset.samples.y[self._split.train[number]]
        counts = np.bincount(labels, minlength=len(self._dataset.classes)).tolist()
        return replace(
            self._machine,
            tier=(Tier.FULL if number in self._full else Tier.HEAD).value,
            samples=sum(counts),
            samples_per_class=counts,
            head=self._kinds.get(number, ""),
            notes=["simulated"],
        )


class _CheckOnce:
    """Runs an extractor's canary once per process: all simulated devices would get the same verdict."""

    def __init__(self, check: Callable[[InstalledRelease], None]) -> None:
        self._check = check
        self._verdicts: dict[str, ArtefactError | None] = {}
        self._lock = threading.Lock()

    def __call__(self, installed: InstalledRelease) -> None:
        sha256 = installed.manifest.extractor.sha256
        with self._lock:
            if sha256 not in self._verdicts:
                try:
                    self._check(installed)
                    self._verdicts[sha256] = None
                except ArtefactError as error:
                    self._verdicts[sha256] = error
        if verdict := self._verdicts[sha256]:
            raise verdict
