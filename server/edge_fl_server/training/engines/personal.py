"""Storage of the personal parts of simulated clients: in memory for a few clients, one file per client for thousands or for a pool."""

from collections.abc import Sequence
from pathlib import Path

from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors
from edge_fl_server.training.clients import ClientId


class PersonalParts:
    """Personal parts by client, in memory, or in `folder` if given. A client without stored parts has its initial ones."""

    def __init__(self, method: Method, folder: Path | None = None) -> None:
        self._method, self._folder = method, folder
        self._stored: dict[ClientId, Parts] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, client: ClientId) -> Parts:
        if self._folder is None:
            if client in self._stored:
                return self._stored[client]
        elif (path := self._path(self._folder, client)).is_file():
            return from_arrays(tensors.unpack(path.read_bytes()))
        return steps.start_own(self._method, client)

    def put(self, client: ClientId, own: Parts) -> None:
        """Replace the client's parts; empty ones are not written to a file."""
        if self._folder is None:
            self._stored[client] = own
        elif own:
            part = (path := self._path(self._folder, client)).with_suffix(".part")
            part.write_bytes(tensors.pack(to_arrays(own)))
            part.replace(path)

    def adopt(self, client: ClientId, file: Path) -> None:
        """Replace the client's parts by those in a file, which is moved."""
        assert self._folder is not None
        file.replace(self._path(self._folder, client))

    def trainable(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """The clients whose privacy budget allows another update."""
        if not self._method.privacy.budget:
            return clients
        return [
            client for client in clients if not update_codec.budget_exhausted(self._method, self.get(client))
        ]

    @staticmethod
    def _path(folder: Path, client: ClientId) -> Path:
        return folder / f"{client}.safetensors"
