"""Samples gathered in pieces: what does not fit into memory is kept in a file, and read back as it was."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from tutti.data import pile
from tutti.data.sources import read_source
from tutti.errors import BadData


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache for a machine that keeps a hundred bytes in memory."""
    monkeypatch.setattr(pile, "_MOST_KEPT", 100)
    monkeypatch.setattr(pile, "_AT_ONCE", 64)
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files():
    """The names of the files that this process has open."""
    return [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]


def test_pieces_of_several_types_are_read_back_and_the_file_goes_with_them(cache, tmp_path):
    pieces = [np.arange(12).reshape(4, 3), np.arange(9.0).reshape(3, 3), np.ones((2, 3), np.float32)] * 2
    gathered = pile.Pile(tmp_path)
    for piece in pieces:
        gathered.add(piece)
    rows = gathered.rows(np.dtype(np.float64))
    expected, second = np.concatenate(pieces), weakref.ref(pieces[1])
    del gathered, pieces, piece
    assert second() is None
    assert any("samples-" in name for name in files())
    assert np.array_equal(rows[:], expected)
    for wanted in (slice(3, 8), np.array([0, 4, 5, 17]), slice(9, 9)):
        assert np.array_equal(rows[wanted], expected[wanted])
    assert list(cache.iterdir()) == []
    del rows
    gc.collect()
    assert not any("samples-" in name for name in files())


def test_tables_are_the_same_from_a_file(cache, tmp_path):
    table = np.arange(200)[::-1].reshape(50, 4)
    (tmp_path / "a.csv").write_text("\n".join(",".join(map(str, row)) for row in table))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in table.tolist()))
    for name in ("a.csv", "a.jsonl"):
        inputs, targets = read_source(str(tmp_path / name), {"target": 0, "classes": 200}).parts["train"]
        assert (inputs[:].tolist(), targets.tolist()) == (table[:, 1:].tolist(), table[:, 0].tolist())


def test_a_cache_without_room_is_named(cache, tmp_path):
    cache.write_text("no folder")
    with pytest.raises(BadData, match=r"cannot be kept in .*; set TUTTI_CACHE to a folder that has room"):
        pile.Pile(tmp_path).add(np.zeros(100))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_large_arrays_of_archives_are_read_when_they_are_needed_and_their_checksums_hold(tmp_path, save):
    values = np.random.default_rng(0).integers(0, 255, (300, 64, 64), dtype=np.uint8)
    targets = np.arange(300) % 3
    save(tmp_path / "a.npz", x=values, y=np.asfortranarray(targets))
    inputs, found = read_source(str(tmp_path / "a.npz"), {}).parts["train"]
    assert np.array_equal(inputs[:, 0] if isinstance(inputs, np.ndarray) else inputs[:][:, 0], values)
    assert found.tolist() == targets.tolist()
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[100_000] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(BadData, match="is truncated or damaged"):
        read_source(str(tmp_path / "a.npz"), {})
