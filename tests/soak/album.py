"""A folder of pictures that people and programs change: the test's own record says what must still be there."""

import io
import os
import unicodedata
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("glas", "müll")
DECOMPOSED = unicodedata.normalize("NFD", CLASSES[1])
SIDE = 24
REST_S = 60
"""Between the times of two pictures: none belongs to the burst of another."""


class Album:
    """Pictures below `folder`; `at_s`: the time of the next one, in seconds since 1970."""

    def __init__(self, folder: Path, seed: int, at_s: float) -> None:
        self.folder = folder
        self.written: dict[str, bytes] = {}
        self._broken: set[str] = set()
        self._rng = np.random.default_rng(seed)
        self._at_s = at_s
        self._number = 0
        self.add(16)

    def add(self, count: int) -> None:
        """Add pictures, as PNG and JPEG in turn, alternately of both classes."""
        for _ in range(count):
            self._number += 1
            folder = CLASSES[self._number % 2]
            suffix = (".png", ".jpg")[self._number // 2 % 2]
            self._write(f"{folder}/{self._number}{suffix}", self._picture())

    def remove(self, count: int) -> None:
        """Delete some pictures, but leave eight of each class."""
        for folder in CLASSES:
            for name in self._some(folder, count // 2):
                (self.folder / name).unlink()
                del self.written[name]

    def rename(self) -> None:
        """Rename one picture of each class to a name that is not UTF-8."""
        for folder in CLASSES:
            for name in self._some(folder, 1):
                self._move(name, f"{folder}/caf\udce9 {self._number}{name[-4:]}")
                self._number += 1

    def relabel(self) -> None:
        """Move one picture into the folder of the other class."""
        for name in self._some(CLASSES[0], 1):
            self._move(name, name.replace(*CLASSES))

    def decompose(self) -> None:
        """Add a picture in a folder whose name a Mac has written: the same class in another form of Unicode."""
        self._number += 1
        self._write(f"{DECOMPOSED}/{self._number}.png", self._picture(shade=1))

    def corrupt(self) -> None:
        """Cut one picture short, and add files that are no pictures of any class."""
        for name in self._some(CLASSES[0], 1):
            self._break(name, self.written[name][: len(self.written[name]) // 2])
        self._number += 1
        # TIF self._break(f"glas/{self._number}.jpg", b"\0\0\0\x1cftypavif" + bytes(40))
        # TIF self._break(f"glas/{self._number}.tif", b"II*\0\xff\xff\xff\xff" + bytes(9))
        self._break("glas/._1.png", b"Mac")
        self._write("@eaDir/glas/x.jpg", self._picture())

    def _break(self, name: str, content: bytes) -> None:
        self._broken.add(name)
        self._write(name, content)

    def require_unchanged(self) -> None:
        """Fail if a file of a person was changed, moved or deleted, or another appeared."""
        found = {
            str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if not path.is_dir()
        }
        assert found.keys() == self.written.keys()
        assert all(path.read_bytes() == self.written[name] for name, path in found.items())

    def _some(self, folder: str, count: int) -> list[str]:
        """Some whole pictures of a class, beyond the eight that stay."""
        whole = [name for name in self.written if name.startswith(f"{folder}/") and name not in self._broken]
        return whole[8:][:count]

    def _picture(self, shade: int | None = None) -> bytes:
        """A picture of the class of the current number, with a coarse pattern of its own."""
        bright = self._number % 2 if shade is None else shade
        coarse = self._rng.integers(0, 110, (6, 6, 3)) + 120 * bright
        pixels = np.kron(coarse, np.ones((SIDE // 6, SIDE // 6, 1))).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, ("PNG", "JPEG")[self._number // 2 % 2], quality=95)
        return out.getvalue()

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._at_s += REST_S
        os.utime(path, (self._at_s, self._at_s))
        self.written[name] = content

    def _move(self, name: str, to: str) -> None:
        (self.folder / name).rename(self.folder / to)
        self.written[to] = self.written.pop(name)
