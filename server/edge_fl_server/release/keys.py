"""Private keys that sign releases: one PEM file per key, named by its key id, in the repository's folder or in other folders."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner

from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text


class Keys:
    """The keys in `folder`, and those that were taken out to the folders `elsewhere`."""

    def __init__(self, folder: Path, elsewhere: Sequence[Path] = ()) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._elsewhere = folder, tuple(elsewhere)

    def create(self, folder: Path | None = None) -> CryptoSigner:
        """Create an ed25519 key, by default in the own folder."""
        signer = CryptoSigner.generate_ed25519()
        if folder and folder not in (self._folder, *self._elsewhere):
            self._elsewhere = (*self._elsewhere, folder)
        _write(_file(folder or self._folder, signer.public_key.keyid), signer.private_bytes)
        return signer

    def folder_of(self, keyid: str) -> Path | None:
        """The folder that holds a key; None if it is not available."""
        return next((f for f in (self._folder, *self._elsewhere) if _file(f, keyid).exists()), None)

    def available(self, keyids: Iterable[str]) -> list[str]:
        """The available ones of these keys."""
        return [keyid for keyid in keyids if self.folder_of(keyid)]

    def require(self, keyids: Sequence[str], threshold: int) -> list[str]:
        """The available ones of these keys. Raises InputError if there are fewer than `threshold`."""
        available = self.available(keyids)
        if len(available) < threshold:
            missing = next(keyid for keyid in keyids if keyid not in available)
            raise InputError(
                f"{_file(self._folder, missing)}: this private key is needed to sign, and is not here"
            )
        return available

    def signer(self, keyid: str) -> CryptoSigner:
        """The signer of an available key."""
        folder = self.folder_of(keyid) or self._folder
        return CryptoSigner(load_pem_private_key(_file(folder, keyid).read_bytes(), None))

    def take_out(self, keyids: Iterable[str], folder: Path) -> list[str]:
        """Move keys from the own folder to another one -> the ids of the moved keys."""
        moved = [keyid for keyid in keyids if _file(self._folder, keyid).exists()]
        for keyid in moved:
            source = _file(self._folder, keyid)
            _write(_file(folder, keyid), source.read_bytes())
            source.unlink()
        return moved


def _file(folder: Path, keyid: str) -> Path:
    return folder / f"{keyid}.pem"


def _write(path: Path, pem: bytes) -> None:
    with reporting(text(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, pem, private=True)
