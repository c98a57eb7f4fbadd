"""Data sets written anew: what is read from them is what was written."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tutti.cli.main import main
from tutti.data.conversion import convert
from tutti.data.formats import FORMATS
from tutti.data.sources import read_source
from tutti.errors import BadData, BadOption

pytest.importorskip("h5py", reason="needs the extra 'data'")
pytest.importorskip("pyarrow", reason="needs the extra 'data'")

ENDINGS = ("", ".npz", ".h5", ".parquet")
R = np.random.default_rng(0)
PICTURES = R.integers(0, 256, (20, 3, 4, 5), dtype=np.uint8)
CLASSES = np.arange(20) % 3


def written(data, path, **options):
    """What is read before and after."""
    before = read_source(data, options)
    convert(before, path)
    return before, read_source(str(path), {name: options[name] for name in ("missing",) if name in options})


def same(before, after):
    assert (before.classes, before.labels, before.columns) == (after.classes, after.labels, after.columns)
    assert list(before.parts) == list(after.parts)
    for (x, y), (x_again, y_again) in zip(before.parts.values(), after.parts.values(), strict=True):
        for one, again in ((x[:], x_again[:]), (y, y_again)):
            assert one.dtype == again.dtype
            assert np.array_equal(one, again, equal_nan=one.dtype.kind == "f")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "data",
    [
        {"x": PICTURES, "y": CLASSES, "label_names": ["cat", "dog", "emu"]},
        {"x": R.integers(-9, 9, (20, 7)), "y": CLASSES, "classes": 5},
        {"x": R.standard_normal((20, 2, 3)), "y": R.standard_normal((20, 2))},
        {"x": R.standard_normal((20, 2)).astype("f4"), "y": R.integers(0, 2, (20, 4))},
        {"x": R.standard_normal((20, 6)), "y": R.integers(0, 3, (20, 6)), "classes": 4},
    ],
)
def test_arrays_stay_as_they_are_in_each_format(tmp_path, data, ending):
    same(*written(data, tmp_path / f"new{ending}"))


@pytest.mark.parametrize("ending", ENDINGS)
def test_numbers_in_the_order_of_bytes_of_other_machines_stay_the_same(tmp_path, ending):
    import h5py

    values = R.standard_normal((20, 3))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = values.astype(">f8"), CLASSES.astype(">i4")
    _, after = written(str(tmp_path / "a.h5"), tmp_path / f"new{ending}")
    inputs, targets = after.parts["train"]
    assert np.array_equal(inputs[:], values)
    assert np.array_equal(targets, CLASSES)


def test_whole_numbers_by_column_are_not_written_where_they_would_be_read_as_floats(tmp_path):
    data = {"x": PICTURES[:, 0, 0], "y": CLASSES, "column_names": list("abcde")}
    same(*written(data, tmp_path / "new.npz"))
    with pytest.raises(BadData, match="columns of uint8, and columns of a Parquet file are read as floats"):
        written(data, tmp_path / "new.parquet")


@pytest.mark.parametrize("ending", ENDINGS)
def test_tables_keep_the_names_of_columns_and_classes_and_what_is_missing(tmp_path, ending, capsys):
    source, new = str(tmp_path / "a.csv"), tmp_path / f"new{ending}"
    (tmp_path / "a.csv").write_text("a,b,kind\n1,2,u\n,4,v\n5,6.5,u\n")
    before, after = written(source, new, target="kind", missing="mean")
    same(before, after)
    assert main(["data", source, "--data.target", "kind"]) == main(["data", str(new)]) == 0
    of_source, of_new = capsys.readouterr().out.split("a: inputs")[1].split("new: inputs")
    assert of_source == of_new
    with pytest.raises(BadOption, match="already; name another"):
        convert(before, new)


LISTS = [[number] * (number % 4) for number in range(20)]
ROWS = [np.full((number % 3 + 1, 2), number / 8) for number in range(20)]


@pytest.mark.parametrize("ending", ENDINGS[:-1])
@pytest.mark.parametrize(
    "inputs", [{"image": PICTURES, "words": LISTS, "age": np.arange(20) / 4}, (PICTURES, ROWS), LISTS]
)
def test_several_inputs_and_sequences_stay_what_they_are(tmp_path, inputs, ending):
    test = {name: one[:9] for name, one in inputs.items()} if isinstance(inputs, dict) else inputs[:9]
    test = tuple(one[:9] for one in inputs) if isinstance(inputs, tuple) else test
    data = {"x_train": inputs, "y_train": CLASSES, "x_test": test, "y_test": CLASSES[:9]}
    before, after = written(data, tmp_path / f"new{ending}")
    assert list(before.parts) == list(after.parts)
    for part in before.parts:
        (one, _), (again, _) = before.parts[part], after.parts[part]
        assert one.names == again.names
        for column, written_again in zip(one.columns, again.columns, strict=True):
            assert column.longest == written_again.longest
            same_samples(samples(column), samples(written_again))


def samples(column):
    """The samples of an input, each an array."""
    if column.values is None:
        return [*column.rows[:]]
    return [column.values[:][begin : begin + length] for begin, length in column.rows[:].tolist()]


def same_samples(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_sequences_of_samples_that_are_left_out_are_not_written(tmp_path):
    values = np.array([0.0, np.nan, 2, 3, np.nan])
    contents = read_source(({"a": values, "b": LISTS[1:6]}, CLASSES[:5]), {"missing": "drop"})
    convert(contents, tmp_path / "new")
    assert np.load(tmp_path / "new" / "x_train.b.npy").tolist() == LISTS[1] + LISTS[3] + LISTS[4]
    same_samples(
        samples(read_source(tmp_path / "new", {}).parts["train"][0].columns[1]),
        [np.array(LISTS[number], np.int64) for number in (1, 3, 4)],
    )
    np.save(tmp_path / "new" / "x_train.b.lengths.npy", [1, 3, 2**40])
    with pytest.raises(BadData, match=r"'x_train.b' of .* has lengths of other sequences"):
        read_source(tmp_path / "new", {})
    np.save(tmp_path / "new" / "x_train.npy", values)
    with pytest.raises(BadData, match=r"5 inputs \(shape \(5,\)\) but 3 targets"):
        read_source(tmp_path / "new", {})  # A plain name is what it says.


def test_parts_stay_apart_and_what_no_file_can_hold_is_refused(tmp_path):
    data = {"x_train": PICTURES, "y_train": CLASSES, "x_val": PICTURES[:4], "y_val": CLASSES[:4]}
    data |= {"x_test": PICTURES[4:9], "y_test": CLASSES[4:9]}
    for ending in ENDINGS[:-1]:
        same(*written(data, tmp_path / f"new{ending}"))
    for name, said in (
        ("b.parquet", "has the parts train, validation, test, and a Parquet file has one"),
        ("b.csv", r"no kind that can be written: .*\.h5, \.npz, \.parquet"),
        ("b/c.npz", "cannot be written: No such file"),
    ):
        with pytest.raises((BadData, BadOption), match=said):
            written(data, tmp_path / name)
    with pytest.raises(
        BadData, match="several inputs, or sequences of unequal length, and a Parquet file takes"
    ):
        written((LISTS, CLASSES), tmp_path / "b.parquet")
    with pytest.raises(BadData, match="would be taken for pictures whose channels come last"):
        written((torch.zeros(20, 5, 4, 3), CLASSES), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "new.h5", "new.npz"]


def test_a_full_disk_is_told_with_what_is_needed_and_what_is_there(tmp_path, monkeypatch):
    contents = read_source((PICTURES, CLASSES), {})
    # So HDF5 puts it; errors of Arrow have no number either.
    said = "Can't write data (file write failed: errno = 28, error message = 'No space left on device')"

    def write(contents, path):
        path.write_bytes(b"some of it")
        raise OSError(said)

    monkeypatch.setattr(FORMATS["HDF5"], "write", write)
    place = re.escape(f"{tmp_path}/new.h5")
    told = (
        f"^cannot write {place}: No space left on device; free .* [0-9,]+ bytes left; the new data take about"
    )
    with pytest.raises(BadData, match=rf"{told} 1,368$"):
        convert(contents, tmp_path / "new.h5")
    assert not [*tmp_path.iterdir()]


def test_the_command_converts_and_says_how_to_go_on(tmp_path, capsys):
    new = tmp_path / "digits"
    assert main(["data", "convert", "digits", str(new)]) == 0
    assert f"wrote 1,438 train, 359 test samples to {new}: " in capsys.readouterr().out
    same(read_source("digits", {}), read_source(str(new), {}))
    assert main(["data", "convert", "digits", str(new)]) == 2
    assert main(["data", "convert", "digits"]) == 2


def test_large_inputs_are_written_as_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tutti.data.formats.npy.SHARD_BYTES", 8 * PICTURES[0].nbytes)
    same(*written({"x": PICTURES, "y": CLASSES}, tmp_path / "new"))
    names = [f"{key}_train-0000{number}-of-00003.npy" for key in "xy" for number in range(3)]
    assert sorted(path.name for path in (tmp_path / "new").glob("*-*")) == names


def test_pieces_of_an_array_that_are_not_one_whole_are_named(tmp_path):
    for name in ("x-0", "y-0"):
        np.save(tmp_path / f"{name}.npy", np.zeros(4, int))
    for extra, said in (
        ("x", "has x.npy and x-0.npy; keep one of these forms"),
        ("x-0-of-2", "have one number; keep one of them"),
        ("x-2", "2 of 3 files x-...; it needs number 1"),
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
