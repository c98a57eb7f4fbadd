"""Ways to damage a checkpoint."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"


class Damage:
    """A choice of what happens to a checkpoint.

    Args:
        seed: of the choice.
        other: a good checkpoint of the same step, of another run.
    """

    def __init__(self, seed: int, other: Path) -> None:
        self._random, self._other = random.Random(seed), other
        self.way: Callable[[Path], bool] = self._random.choice(
            [
                self.flip_a_bit,
                self.flip_a_bit,
                self.flip_a_bit_of_the_manifest,
                self.truncate,
                self.extend,
                self.zero_a_page,
                self.swap,
                self.lose,
                self.make_a_folder,
                self.take_of_another_run,
                self.rename,
                self.repeat_a_key,
            ]
        )

    def do(self, path: Path) -> bool:
        """Damage the checkpoint; False: nothing has changed, by luck."""
        return self.way(path)

    def flip_a_bit(self, path: Path) -> bool:
        return self._flip(self._random.choice(sorted(path.iterdir())))

    def flip_a_bit_of_the_manifest(self, path: Path) -> bool:
        return self._flip(path / MANIFEST)

    def truncate(self, path: Path) -> bool:
        file = self._file(path)
        os.truncate(file, self._random.randrange(file.stat().st_size))
        return True

    def extend(self, path: Path) -> bool:
        with open(self._file(path), "ab") as stream:
            stream.write(self._random.choice([b"\0", b" ", b"\n", b"\0" * 4096]))
        return True

    def zero_a_page(self, path: Path) -> bool:
        file = self._file(path)
        content = bytearray(before := file.read_bytes())
        start = self._random.randrange(len(content)) // 512 * 512
        content[start : start + 512] = bytes(len(content[start : start + 512]))
        file.write_bytes(content)
        return content != before

    def swap(self, path: Path) -> bool:
        one, two = self._random.sample(sorted(path.iterdir()), 2)
        different = one.read_bytes() != two.read_bytes()
        one.rename(path / "aside")
        two.rename(one)
        (path / "aside").rename(two)
        return different

    def lose(self, path: Path) -> bool:
        self._file(path).unlink()
        return True

    def make_a_folder(self, path: Path) -> bool:
        file = self._file(path)
        file.unlink()
        file.mkdir()
        return True

    def take_of_another_run(self, path: Path) -> bool:
        file = self._file(path)
        different = file.read_bytes() != (self._other / file.name).read_bytes()
        shutil.copy(self._other / file.name, file)
        return different

    def rename(self, path: Path) -> bool:
        path.rename(path.with_name("step-00000099"))
        return True

    def repeat_a_key(self, path: Path) -> bool:
        file = path / MANIFEST
        file.write_bytes(file.read_bytes().replace(b"{", b'{"step": 7, ', 1))
        return True

    def _file(self, path: Path) -> Path:
        return self._random.choice(sorted(path.iterdir()))

    def _flip(self, file: Path) -> bool:
        content = bytearray(file.read_bytes())
        content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        file.write_bytes(content)
        return True
