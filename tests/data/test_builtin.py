"""The built-in data sets hold what their publishers say."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

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


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Writes an archive of two pictures in each file."""
    monkeypatch.setenv("TUTTI_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()

    def write(content, names=("test_batch", *(f"data_batch_{number}" for number in range(1, 6)))):
        path = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for at, name in enumerate(names):
                info = tarfile.TarInfo(f"batches/{name}.bin")
                held = content(slice(2 * at, 2 * at + 2))
                info.size = len(held)
                archive.addfile(info, io.BytesIO(held))
        return path

    return write


def test_cifar10_is_read_from_the_archive_of_its_publisher(pack):
    pack(as_bytes)
    contents = read_source("cifar10", {})
    (x, y), (x_test, y_test) = contents.parts["train"], contents.parts["test"]
    assert np.array_equal(np.concatenate([x_test, x]), PIXELS.reshape(12, 3, 32, 32))
    assert [*y_test, *y] == CLASSES
    assert (contents.classes, contents.labels[3]) == (10, "cat")


def test_a_broken_archive_of_cifar10_is_refused(pack):
    path = pack(as_bytes, ["data_batch_1", "data_batch_2", "data_batch_3", "test_batch"])
    with pytest.raises(BadData, match=r"lacks data_batch_4\.bin, data_batch_5\.bin"):
        read_source("cifar10", {})
    path = pack(lambda rows: as_bytes(rows)[:-1])
    with pytest.raises(BadData, match="no whole pictures"):
        read_source("cifar10", {})
    pack(as_bytes)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadData, match="is truncated or damaged"):
        read_source("cifar10", {})
