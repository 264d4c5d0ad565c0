"""The director: signs the server's messages to single devices with the online key that the signed metadata of releases name.

A broker, which has no such key, can then neither assign a release, a round or an agent, nor give a command or open a secure sum. Numbers
grow from signature to signature, also across restarts and in a repository that was restored from a backup: they begin with the time, and
never below those reserved in FOLDER/signed.
"""

import fcntl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from tuf.api.metadata import Role, Timestamp

from edge_fl.errors import InputError
from edge_fl.fields import ServerSignature
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.fleet.remote_settings import DesiredSettings
from edge_fl.release.agent import AgentUpdate
from edge_fl.secure import signatures
from edge_fl.wire.messages import Assignment, Command, encode
from edge_fl_server.mqtt.connection import M
from edge_fl_server.release.repository import Repository

RESERVED = 2**20
LIFE_S = 7 * 86_400


@dataclass(eq=False)
class Director:
    """Signs for the devices of one fleet; thread-safe."""

    repository: Repository
    fleet: str
    clock: Callable[[], float] = time.time
    _number: int = 0
    _end: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sign(self, kind: str, device: str, message: M, *, lasts: bool = False) -> M:
        """Sign a message of this kind (`edge_fl.wire.topics.Address.kind`) for one device; `lasts`: until it expires, else for ever.

        Raises InputError if the online key is not available.
        """
        expires = int(self.clock() + LIFE_S) if lasts else 0
        signature = ServerSignature(self.fleet, device, self._next_number(), expires)
        content = signatures.to_device(kind, signature, encode(replace(message, signature=None)))
        signature = replace(signature, signatures=self._signatures(content))
        return replace(message, signature=signature)

    def is_stale(self, message: Assignment | Command | AgentUpdate | DesiredSettings) -> bool:
        """Whether a message should be signed again: its signature has less than a third of its life left, or is by a replaced key."""
        if message.signature is None:
            return True
        expires = message.signature.expires
        near_expiry = expires and expires - self.clock() < LIFE_S / 3
        return bool(near_expiry) or not message.signature.signatures.keys() <= {*self._role().keyids}

    def _signatures(self, content: bytes) -> dict[str, str]:
        role, keys = self._role(), self.repository.keys
        keyids = keys.require(role.keyids, role.threshold)
        return {keyid: keys.signer(keyid).sign(content).signature for keyid in keyids}

    def _role(self) -> Role:
        """The current online keys; another process may have replaced them."""
        repository = self.repository
        if (repository.folder / "metadata" / f"{repository.root().version + 1}.root.json").exists():
            repository.reload()
        return repository.root().roles[Timestamp.type]

    def _next_number(self) -> int:
        with self._lock:
            if self._number == self._end:
                self._number = self._reserve()
                self._end = self._number + RESERVED
            self._number += 1
            return self._number

    def _reserve(self) -> int:
        """Reserve numbers that no other process has used or will use.

        The lock is not that of the repository, which is held while a release is published and its assignments are signed.
        """
        path: Path = self.repository.folder / "signed"
        with reporting(text(path)), path.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                used = int(path.read_text()) if path.exists() else 0
            except ValueError as error:
                raise InputError(
                    f"{text(path)}: {error}; expected the highest number of a signature"
                ) from error
            first = max(used, int(self.clock() * 1e6))
            atomic.write(path, f"{first + RESERVED}\n")
            return first
