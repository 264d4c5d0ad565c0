"""The private keys that sign releases, one PEM file each, named by its key id: in a folder of their own, or taken out to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner

from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting


class Keys:
    """The keys in `folder`, made on first use; those that were taken out are looked for `elsewhere` too."""

    def __init__(self, folder: Path, elsewhere: Sequence[Path] = ()) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._elsewhere = folder, tuple(elsewhere)

    def new(self, folder: Path | None = None) -> CryptoSigner:
        """A new ed25519 key, in `folder` or with the others; from now on it is found there."""
        signer = CryptoSigner.generate_ed25519()
        if folder and folder not in (self._folder, *self._elsewhere):
            self._elsewhere = (*self._elsewhere, folder)
        _write(_file(folder or self._folder, signer.public_key.keyid), signer.private_bytes)
        return signer

    def place(self, keyid: str) -> Path | None:
        """The folder that holds a key; None when it is not at hand."""
        return next((f for f in (self._folder, *self._elsewhere) if _file(f, keyid).exists()), None)

    def held(self, keyids: Iterable[str]) -> list[str]:
        """Those of the keys that are at hand."""
        return [keyid for keyid in keyids if self.place(keyid)]

    def at_hand(self, keyids: Sequence[str], threshold: int) -> list[str]:
        """As `held`. Raises InputError, naming one that is missing, when they are fewer than `threshold`."""
        held = self.held(keyids)
        if len(held) < threshold:
            missing = next(keyid for keyid in keyids if keyid not in held)
            raise InputError(
                f"{_file(self._folder, missing)}: this private key is needed to sign, and is not here"
            )
        return held

    def signer(self, keyid: str) -> CryptoSigner:
        """What signs with a key that is at hand."""
        folder = self.place(keyid) or self._folder
        return CryptoSigner(load_pem_private_key(_file(folder, keyid).read_bytes(), None))

    def take_out(self, keyids: Iterable[str], folder: Path) -> list[str]:
        """Moves those that are in the own folder into another one -> their ids."""
        moved = [keyid for keyid in keyids if _file(self._folder, keyid).exists()]
        for keyid in moved:
            source = _file(self._folder, keyid)
            _write(_file(folder, keyid), source.read_bytes())
            source.unlink()
        return moved


def _file(folder: Path, keyid: str) -> Path:
    return folder / f"{keyid}.pem"


def _write(path: Path, pem: bytes) -> None:
    with reporting(str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, pem, private=True)
