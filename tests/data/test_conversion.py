"""Data sets written as folders of NPY files: what is read from them is what was written."""

from __future__ import annotations

import errno
import os
import re

import numpy as np
import pytest

from tutti.cli.main import main
from tutti.data import conversion
from tutti.data.conversion import convert
from tutti.data.sources import read_source
from tutti.errors import BadData, BadOption

R = np.random.default_rng(0)
PICTURES = R.integers(0, 256, (20, 3, 4, 5), dtype=np.uint8)
CLASSES = np.arange(20) % 3
LISTS = [[number] * (number % 4) for number in range(20)]
ROWS = [np.full((number % 3 + 1, 2), number / 8) for number in range(20)]


def written(data, path, **options):
    """What is read before and after."""
    before = read_source(data, options)
    convert(before, path)
    return before, read_source(str(path), {name: options[name] for name in ("missing",) if name in options})


def samples(column):
    """The samples of an input, each an array."""
    if column.values is None:
        return [*column.rows[:]]
    return [column.values[:][begin : begin + length] for begin, length in column.rows[:].tolist()]


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def assert_same_data(before, after):
    assert (before.classes, before.labels, before.columns) == (after.classes, after.labels, after.columns)
    assert list(before.parts) == list(after.parts)
    for (x, y), (x_again, y_again) in zip(before.parts.values(), after.parts.values(), strict=True):
        assert_same([x[:], y], [x_again[:], y_again])


@pytest.mark.parametrize(
    "data",
    [
        {"x": PICTURES, "y": CLASSES, "label_names": ["cat", "dog", "emu"]},
        {"x": R.integers(-9, 9, (20, 7)), "y": CLASSES, "classes": 5},
        {"x": R.standard_normal((20, 2, 3)), "y": R.standard_normal((20, 2))},
        {"x": R.standard_normal((20, 3)).astype(">f8"), "y": R.integers(0, 2, (20, 4)).astype(">i4")},
        {"x": R.standard_normal((20, 3)), "y": 2 * CLASSES + 3},
        {"x": R.standard_normal((20, 3)), "y": CLASSES > 1},
        {"x": R.standard_normal((80, 3)), "y": np.arange(80) * 7.0},
        {"x_train": PICTURES, "y_train": CLASSES, "x_val": PICTURES[:4], "y_val": CLASSES[:4]},
    ],
)
def test_arrays_stay_as_they_are(tmp_path, data):
    before, after = written(data, tmp_path / "new")
    assert_same_data(before, after)


def test_tables_keep_the_names_of_columns_and_classes_and_missing_values(tmp_path, capsys):
    source, new = str(tmp_path / "a.csv"), tmp_path / "new"
    (tmp_path / "a.csv").write_text("a,b,kind\n1,2,u\n,4,v\n5,6.5,u\n")
    before, after = written(source, new, target="kind", missing="mean")
    assert_same_data(before, after)
    assert main(["data", source, "--data.target", "kind"]) == main(["data", str(new)]) == 0
    of_source, of_new = capsys.readouterr().out.split("a: inputs")[1].split("new: inputs")
    assert of_source == of_new
    with pytest.raises(BadOption, match="already; name another"):
        convert(before, new)


@pytest.mark.parametrize(
    "inputs", [{"image": PICTURES, "words": LISTS, "age": np.arange(20) / 4}, (PICTURES, ROWS), LISTS]
)
def test_several_inputs_and_sequences_stay_what_they_are(tmp_path, inputs):
    test = {name: one[:9] for name, one in inputs.items()} if isinstance(inputs, dict) else inputs[:9]
    test = tuple(one[:9] for one in inputs) if isinstance(inputs, tuple) else test
    data = {"x_train": inputs, "y_train": CLASSES, "x_test": test, "y_test": CLASSES[:9]}
    before, after = written(data, tmp_path / "new")
    assert list(before.parts) == list(after.parts)
    for part in before.parts:
        (one, _), (again, _) = before.parts[part], after.parts[part]
        assert one.names == again.names
        for column, written_again in zip(one.columns, again.columns, strict=True):
            assert column.longest == written_again.longest
            assert_same(samples(column), samples(written_again))


def test_sequences_of_samples_that_are_left_out_are_not_written(tmp_path):
    values = np.array([0.0, np.nan, 2, 3, np.nan])
    contents = read_source(({"a": values, "b": LISTS[1:6]}, CLASSES[:5]), {"missing": "drop"})
    convert(contents, tmp_path / "new")
    assert np.load(tmp_path / "new" / "x_train.b.npy").tolist() == LISTS[1] + LISTS[3] + LISTS[4]
    np.save(tmp_path / "new" / "x_train.b.lengths.npy", [1, 3, 2**40])
    with pytest.raises(BadData, match=r"'x_train.b' of .* has lengths of other sequences"):
        read_source(tmp_path / "new", {})


def test_a_full_disk_leaves_nothing_and_says_what_is_needed(tmp_path, monkeypatch):
    def write(path, rows):
        path.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(conversion, "_write", write)
    with pytest.raises(
        BadData, match=r"No space left on device; free .* the new data take about 1,368 bytes$"
    ):
        convert(read_source((PICTURES, CLASSES), {}), tmp_path / "new")
    assert not [*tmp_path.iterdir()]


def test_the_command_converts_and_says_how_to_go_on(tmp_path, capsys):
    new = tmp_path / "digits"
    assert main(["data", "convert", "digits", str(new)]) == 0
    assert f"wrote 1,438 train, 359 test samples to {new}: " in capsys.readouterr().out
    assert_same_data(read_source("digits", {}), read_source(str(new), {}))
    assert main(["data", "convert", "digits", str(new)]) == 2
    assert main(["data", "convert", "digits", f"{new}.npz"]) == 2
    assert main(["data", "convert", "digits"]) == 2


def test_pieces_of_an_array_that_are_not_one_whole_are_refused(tmp_path):
    for name in ("x-0", "y-0"):
        np.save(tmp_path / f"{name}.npy", np.zeros(4, int))
    for extra, said in (
        ("x", "x.npy and x-...; keep one of these forms"),
        ("x-1-of-3", "has 2 files x-0.npy"),
    ):
        np.save(tmp_path / f"{extra}.npy", np.zeros(4, int))
        with pytest.raises(BadData, match=re.escape(said)):
            read_source(str(tmp_path), {})
        (tmp_path / f"{extra}.npy").unlink()


def test_several_inputs_are_read_into_memory_and_not_streamed(tmp_path):
    convert(read_source((LISTS, CLASSES), {}), tmp_path / "new")
    assert not read_source(tmp_path / "new", {}).buffer_bytes
    with pytest.raises(BadOption, match=r"--data.stream true"):
        read_source(tmp_path / "new", {"stream": True})
