"""The clients of a run for any process: the method's spec, all images once, and the split.

A store is written to a folder once; any number of processes memory-map its images. Clients are built on access.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from edge_fl.config import MethodSpec
from edge_fl.data.partition import Split
from edge_fl.data.samples import ClientData, Images, Labels, Samples
from edge_fl.methods.contract.client import Client
from edge_fl_server.training.clients import ClientId
from edge_fl_server.training.studies import Study

X, Y, SPLIT, SETTINGS = "x.npy", "y.npy", "split.npz", "settings.json"


class ClientSettings(msgspec.Struct, frozen=True):
    """The method spec and the ids of the clients that train."""

    spec: MethodSpec
    clients: tuple[ClientId, ...]
    precision: str = "fp32"


@dataclass(frozen=True, eq=False)
class ClientStore(Mapping[ClientId, Client]):
    """The clients of a run by id, each built on access from its rows of `x` uint8 [N, C, H, W] and `y` [N]."""

    settings: ClientSettings
    x: Images
    y: Labels
    split: Split
    device: str = "cpu"

    @classmethod
    def of(cls, study: Study, device: str = "cpu") -> "ClientStore":
        """The store of a study's training clients."""
        trained = tuple(id for id in study.split.clients if id not in set(study.unseen))
        samples = study.dataset.samples
        return cls(
            ClientSettings(study.spec, trained, study.recipe.precision),
            samples.x,
            samples.y,
            study.split,
            device,
        )

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> "ClientStore":
        """Open a saved store; images are memory-mapped."""
        settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=ClientSettings)
        x, y = np.load(folder / X, mmap_mode="r"), np.load(folder / Y)
        return cls(settings, x, y, Split.load(folder / SPLIT), device)

    def save(self, folder: Path) -> None:
        """Write the store into a folder."""
        np.save(folder / X, self.x)
        np.save(folder / Y, self.y)
        self.split.save(folder / SPLIT)
        (folder / SETTINGS).write_bytes(msgspec.json.encode(self.settings))

    def samples(self, id: ClientId) -> int:
        """Number of training samples of a client."""
        return len(self.split.train[self._rows[id]])

    def __getitem__(self, id: ClientId) -> Client:
        row, spec = self._rows[id], self.settings.spec
        parts = (self.split.train[row], self.split.validation[row], self.split.test[row])
        data = ClientData(*(Samples(np.asarray(self.x[rows]), self.y[rows]) for rows in parts))
        precision = self.settings.precision
        return Client(id, data, len(spec.classes), spec.method.batch_size, spec.seed, self.device, precision)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.settings.clients)

    def __len__(self) -> int:
        return len(self.settings.clients)

    @cached_property
    def _rows(self) -> Mapping[ClientId, int]:
        return {id: row for row, id in enumerate(self.split.clients)}
