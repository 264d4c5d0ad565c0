"""The personal parts of simulated clients: each client's exist from the start and are only ever read and written for that client.

Kept in memory for a few clients, or one file per client in a folder when there are thousands, or when several processes do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors
from server.training.fleet import ClientId


class PersonalParts:
    """Personal parts by client, from memory, or from `folder` when one is given. A client never written has its initial parts."""

    def __init__(self, method: Method, folder: Path | None = None) -> None:
        self._method, self._folder = method, folder
        self._held: dict[ClientId, Parts] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, client: ClientId) -> Parts:
        """The client's parts as they are now."""
        if self._folder is None:
            return self._held[client] if client in self._held else steps.start_own(self._method, client)
        path = self._path(self._folder, client)
        if not path.is_file():
            return steps.start_own(self._method, client)
        return from_arrays(tensors.unpack(path.read_bytes()))

    def put(self, client: ClientId, own: Parts) -> None:
        """Replaces the client's parts; a client without any costs nothing."""
        if self._folder is None:
            self._held[client] = own
        elif own:
            part = (path := self._path(self._folder, client)).with_suffix(".part")
            part.write_bytes(tensors.pack(to_arrays(own)))
            part.replace(path)

    def adopt(self, client: ClientId, file: Path) -> None:
        """Replaces the client's parts by a file that holds them, which is moved."""
        assert self._folder is not None
        file.replace(self._path(self._folder, client))

    def trainable(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """Those whose privacy budget allows another update."""
        if not self._method.privacy.budget:
            return clients
        return [
            client for client in clients if not update_codec.budget_exhausted(self._method, self.get(client))
        ]

    def everything(self, clients: Iterable[ClientId]) -> Iterator[tuple[ClientId, Parts]]:
        """(client, parts) one after the other, so that the whole never has to fit into memory."""
        return ((client, self.get(client)) for client in clients)

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        """Puts many back."""
        for client, own in states:
            self.put(client, own)

    @staticmethod
    def _path(folder: Path, client: ClientId) -> Path:
        return folder / f"{client}.safetensors"
