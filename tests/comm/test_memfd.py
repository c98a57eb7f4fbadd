"""Anonymous files: whose they are, and what they are, is seen before they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.comm.shm import memfd
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.memfd import FileAddress


@pytest.fixture
def file() -> Iterator[int]:
    fd = memfd.make("test")
    yield fd
    os.close(fd)


def become_another_user(patch: pytest.MonkeyPatch) -> None:
    user = os.geteuid() + 1
    patch.setattr(os, "geteuid", lambda: user)


def test_an_address_opens_the_same_file(file: int) -> None:
    other = FileAddress.parse(str(FileAddress.of(file))).open()
    os.write(other, b"seen")
    assert os.pread(file, 4, 0) == b"seen"
    os.close(other)


def test_a_file_with_a_name_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "memfd:tutti", "w+b") as named:
        named.truncate(1 << 16)
        with pytest.raises(ValueError, match="not shared memory"):
            FileAddress.of(named.fileno()).open()
        with pytest.raises(ValueError, match=f"descriptor {named.fileno()} "):
            Arena.attach(named.fileno())


def test_an_inherited_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create()
    become_another_user(monkeypatch)
    with pytest.raises(ValueError, match=f"descriptor {arena.fd} is"):
        Arena.attach(arena.fd)
    arena.close()


@pytest.mark.parametrize("text", ["", "1", "-1 3", "1 /etc/passwd", "1 3 4", "../1 3", "\0"])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        FileAddress.parse(text)
