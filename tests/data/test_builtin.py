"""The built-in data sets hold what their publishers say."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tutti.data.builtin import cifar10
from tutti.data.builtin.digits import _digits_table
from tutti.data.sources import read_source
from tutti.errors import BadData


def test_digits_are_those_of_scikit_learn():
    bunch = load_digits()
    table = _digits_table()
    assert np.array_equal(table[:, :-1], bunch.data)
    assert np.array_equal(table[:, -1], bunch.target)


def test_digits_have_a_fixed_stratified_test_part(opened):
    first, second = opened("digits", seed=0), opened("digits", seed=1)
    assert (len(first.train), len(first.validation), len(first.test)) == (1294, 144, 359)
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert not torch.equal(first.validation.inputs, second.validation.inputs)
    assert first.classes == 10
    assert first.shape == (1, 8, 8)
    counts = torch.bincount(first.test.targets)
    assert counts.max() - counts.min() <= 2


def test_opening_digits_does_not_import_scikit_learn():
    program = (
        "import sys; from tutti.data.builtin import BUILT_IN; BUILT_IN['digits']();"
        "sys.exit('sklearn' in sys.modules or 'scipy' in sys.modules or 'pooch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


@pytest.mark.mnist
@pytest.mark.parametrize(
    ("name", "first", "label"),
    [("mnist", [5, 0, 4, 1, 9], "5"), ("fashion-mnist", [9, 0, 0, 3, 0], "Sandal")],
)
def test_published_data_sets_are_read_whole(real_data, opened, name, first, label):
    found = opened(name, validation=0)
    assert (len(found.train), len(found.test)) == (60000, 10000)
    assert found.train.inputs.dtype == torch.uint8
    assert found.train.targets[:5].tolist() == first
    assert found.shape == (1, 28, 28)
    assert found.labels[5] == label


PIXELS = np.arange(12 * 3072).reshape(12, 3072).astype(np.uint8)
CLASSES = [*range(10), 3, 1]


def as_bytes(rows):
    return np.column_stack([CLASSES[rows], PIXELS[rows]]).astype(np.uint8).tobytes()


def as_pickle(rows):
    return pickle.dumps({b"labels": CLASSES[rows], b"data": PIXELS[rows], b"filenames": [b"a.png"]}, 2)


def as_old_pickle(rows):
    """As Python 2 wrote it: U is a short text, T a long one, K a small number."""
    pixels, numbers = PIXELS[rows].tobytes(), b"".join(b"K" + bytes([one]) for one in CLASSES[rows])
    long = b"T" + len(pixels).to_bytes(4, "little") + pixels
    return b"\x80\x02}(U\x06labels](" + numbers + b"eU\x04data" + long + b"u."


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Writes an archive of two pictures in each file."""
    monkeypatch.setenv("TUTTI_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()

    def write(kind, content, names=("test_batch", *(f"data_batch_{number}" for number in range(1, 6)))):
        path = tmp_path / "cifar10" / f"cifar-10-{kind}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for at, name in enumerate(names):
                info = tarfile.TarInfo(f"batches/{name}" + (".bin" if kind == "binary" else ""))
                held = content(slice(2 * at, 2 * at + 2))
                info.size = len(held)
                archive.addfile(info, io.BytesIO(held))
        return path

    return write


@pytest.mark.parametrize(
    ("kind", "content"), [("binary", as_bytes), ("python", as_pickle), ("python", as_old_pickle)]
)
def test_cifar10_is_read_from_both_archives_of_its_publisher(pack, kind, content):
    pack(kind, content)
    contents = read_source("cifar10", {})
    (x, y), (x_test, y_test) = contents.parts["train"], contents.parts["test"]
    assert np.array_equal(np.concatenate([x_test, x]), PIXELS.reshape(12, 3, 32, 32))
    assert [*y_test, *y] == CLASSES
    assert (contents.classes, contents.labels[3]) == (10, "cat")


class Harm:
    def __reduce__(self):
        return os._exit, (1,)


def test_archives_of_cifar10_run_no_code_and_are_refused_when_broken(pack, monkeypatch):
    pack("python", lambda rows: pickle.dumps({b"data": Harm(), b"labels": [1]}))
    with pytest.raises(BadData, match="for 1 pictures"):
        read_source("cifar10", {})
    path = pack("binary", as_bytes, ["data_batch_1", "test_batch"])
    with pytest.raises(BadData, match="lacks data_batch_2, data_batch_3, data_batch_4, data_batch_5; down"):
        read_source("cifar10", {})
    path = pack("binary", lambda rows: as_bytes(rows)[:-1])
    with pytest.raises(BadData, match="no whole pictures"):
        read_source("cifar10", {})
    pack("binary", as_bytes)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(BadData, match="is truncated or damaged"):
        read_source("cifar10", {})
    path.write_bytes(whole)
    monkeypatch.setattr(cifar10, "_MOST_UNPACKED", 20_000)
    with pytest.raises(BadData, match="more than 20,000 bytes when it is unpacked"):
        read_source("cifar10", {})
