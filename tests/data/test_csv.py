"""Tables in CSV files: columns, targets, missing values; and several files as one data set."""

from __future__ import annotations

import gzip
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_pool
from tutti.data.contents import Contents
from tutti.data.sources import read_source
from tutti.data.targets import KnownClasses, with_checked_targets
from tutti.errors import BadData, UserError
from tutti.records.splits import Split, write_splits

TABLE = "height,weight,species\n1,2.5,cat\n3,4,dog\n5,-6e1,cat\n7,8,'cow'\n".replace("'", '"')


@pytest.fixture
def read(tmp_path):
    """Writes a text as a file, and reads its training part."""

    def write_and_read(text, name="a.csv", **options):
        (tmp_path / name).write_text(text)
        contents = read_source(str(tmp_path / name), options)
        inputs, targets = contents.parts["train"]
        return inputs[:], targets, contents

    return write_and_read


ROWS = "5.1,3.5,cat\n4.9,3,dog\n6,2,cat\n"
INDEXED = "{},a,label\n7,1,0\n8,2,1\n"
NO_INDEX = ("", "Unnamed: 0", "__index_level_0__")

TABLES = {
    "texts are classes": (
        *(TABLE, {"target": "species"}, [[1, 2.5], [3, 4], [5, -60], [7, 8]], [0, 2, 0, 1]),
        {"classes": 3, "labels": ("cat", "cow", "dog"), "columns": ("height", "weight")},
    ),
    "gaps behind a space": (
        *("a, b, y\n1, 2, x\n2, ?, z\n3, 4, NA\n5, 6, z\n", {"missing": "drop"}, [[1, 2], [5, 6]], [0, 1]),
        {"labels": ("x", "z")},
    ),
    "targets with a leading zero": (
        *("a,y\n1,01\n2,1\n3,10\n", {}, [[1], [2], [3]], [0, 1, 2], {"labels": ("01", "1", "10")}),
    ),
    "whole numbers in any form": ("a,y\n1,1.0\n2,0\n3,1\n", {}, [[1], [2], [3]], [1, 0, 1], {}),
    "fractions": ("a,y\n1,0.5\n2,0\n3,1\n", {}, [[1], [2], [3]], [0.5, 0, 1], {}),
    "codes unprepared": ("zip,y\n01392,0\n1392,1\n", {"prepare": "off"}, [[1392], [1392]], [0, 1], {}),
    "columns by name": (
        *(TABLE, {"target": "height", "columns": ["weight"], "classes": 8}),
        *([[2.5], [4], [-60], [8]], [1, 3, 5, 7], {}),
    ),
    "columns by position": (
        *(TABLE, {"target": -1, "columns": [1, 0]}, [[2.5, 1], [4, 3], [-60, 5], [8, 7]], [0, 2, 0, 1], {}),
    ),
    "several targets": (
        *("a,b,c\n1,2,0.5\n3,4,5\n", {"target": ["b", "c"]}, [[1], [3]], [[2, 0.5], [4, 5]]),
        {"classes": None},
    ),
    "a column called label": ("Label,x\n1,5\n0,6\n", {}, [[5], [6]], [1, 0], {}),
    "no names": ("1,2,0\n3,4,1\n", {"target": -1}, [[1, 2], [3, 4]], [0, 1], {}),
    "a first row with a class": (
        *(ROWS, {"target": -1, "columns": [1]}, [[3.5], [3], [2]], [0, 1, 0], {"columns": ("1",)}),
    ),
    "names that are numbers": (
        *("2019,2020,kind\n" + ROWS, {"target": "kind", "columns": [1]}, [[3.5], [3], [2]], [0, 1, 0]),
        {"columns": ("2020",)},
    ),
    "names that count": ("0,1,2\n5,6,1\n7,8,0\n", {"target": -1}, [[5, 6], [7, 8]], [1, 0], {}),
    **{f"an index '{one}'": (INDEXED.format(one), {}, [[1], [2]], [0, 1], {}) for one in NO_INDEX},
    **{
        f"a wanted index '{one}'": (INDEXED.format(one), {"columns": ["a", 0]}, [[1, 7], [2, 8]], [0, 1], {})
        for one in NO_INDEX
    },
}
"""Texts and options; the inputs, the targets and other facts."""


@pytest.mark.parametrize(("text", "options", "inputs", "targets", "facts"), TABLES.values(), ids=TABLES)
def test_tables_are_read(read, text, options, inputs, targets, facts):
    found, goals, contents = read(text, **options)
    np.testing.assert_array_equal(found, np.array(inputs, np.float32))
    assert goals.tolist() == targets
    assert {name: getattr(contents, name) for name in facts} == facts


def test_names_of_classes_that_look_like_numbers_are_met_again_by_name():
    parts = {"train": (np.zeros((2, 1), np.float32), np.array([2, 1]))}
    known = KnownClasses(3, ("1", "2", "A"))
    found = with_checked_targets(Contents("it", parts), None, known)
    assert found.parts["train"][1].tolist() == [1, 0]


def test_inputs_with_a_leading_zero_are_texts_and_commas_are_points_among_texts(read):
    inputs, _, contents = read("zip;n;y\n01392;1,5;0\n1392;-;1\n90210;1,234;0\n")
    assert [column.kind for column in contents.table.columns] == ["text", "number"]
    np.testing.assert_array_equal(inputs, np.array([[0, 1.5], [1, np.nan], [2, 1.234]], np.float32))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_quotes_blank_lines_and_packed_files_are_read(tmp_path, separator):
    text = '\ufeff"a",y\n"1",0\n\n 2 ,1\n'.replace(",", separator)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    contents = read_source(str(tmp_path / "a.csv.gz"), {})
    assert contents.name == "a"
    assert contents.parts["train"][0][:].tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("a,b,y\n1,2,0\n3,x4,1\n", {"prepare": "off"}, "string in the column 'b'"),
        ("a,b,y\n" + "1,2.5,0\n" * 20 + "3,x4,1\n", {}, r"column 'b'.* in row 21 'x4'.*--data.columns"),
        ("a,b,y\ncm,kg,0\n" + "1,2.5,0\n3,4,1\n" * 20, {}, "in row 1 .*second line of names"),
        ("a;y\n1,5;0\n2.5;1\n", {}, r"numbers such as '1,5', and others such as '2\.5'"),
        ("a,y\n1,0\n1,2,3\n", {}, "Expected 2 columns, got 3"),
        ("a,b,y\n1,,0\n3,4,1\n", {"missing": "error"}, r"1 of 2 .* row 1, column 'b'.*--data.missing drop"),
        ("a,b,y\ncm,kg,\n" + "1,2.5,0\n3,4,1\n" * 20, {"missing": "drop"}, "in row 1 .*second line of names"),
        ("a,y\n1,0\n3,?\n", {"missing": "error"}, r"no value in row 2 of the target 'y'"),
        ("a,y\n1,0\n3,?\n4,?\n", {"missing": "error"}, "targets are missing in 2 rows"),
        ("a,y\n,0\n,1\n", {"missing": "drop"}, "every train sample has a missing value"),
        ("a,b,y\n1,2,0\n,inf,1\n", {"missing": "mean"}, "NaN or inf .* row 2, column 'b'"),
        ("a,b,y\n,2,0\n1,2,1\n1,inf,1\n", {"missing": "drop"}, "NaN or inf .* row 3, column 'b'"),
        (
            "a,b,income,y\n31,Rome,2.5,yes\n",
            {"prepare": "off"},
            r"string in the column 'b'.*columns a,income$",
        ),
        ("a,b\n1,2\n", {}, r"--data.target NAME; its columns are a, b"),
        ("y,label\n1,2\n", {}, "several columns with a name"),
        ("1,2,0\n3,4,1\n", {}, "no line with the names of its 3 columns"),
        ("a,y\n", {}, "has no rows"),
        ("a,a,y\n1,2,0\n", {}, "two columns called 'a'"),
        ("y\n1\n", {}, "no column but the target"),
        ("a,b,y\n1,2,0\n", {"target": ["a", "y"], "columns": "bb"}, "did you mean 'b'"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_place(read, text, options, said):
    with pytest.raises(UserError, match=said):
        read(text, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "weight", "columns": "weight"}, "'weight' is input and target at once"),
        ({"columns": ["weight", "weight"]}, "names a column twice"),
        ({"column": "weight"}, "did you mean 'columns'"),
        ({"clases": 3}, r"'classes'\? Known: classes, columns, group, missing, prepare, target, text"),
        ({"missing": "median"}, "give one of auto, error, drop, mean"),
        ({"prepare": "no"}, r"--data.prepare is 'no'; give one of auto, off"),
    ],
)
def test_options_that_cannot_be_used_are_refused(read, options, said):
    with pytest.raises(UserError, match=said):
        read(TABLE, **{"target": "species", **options})


def test_text_in_another_encoding_and_bytes_are_refused(tmp_path):
    for text in ("größe,y\n1,2\n", "x,y\ngroß,2\n", "x,y\n" + "1,ja\n" * 5000 + "1,nö\n"):
        (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(BadData, match=r"is not in UTF-8; .* iconv -f latin1"):
            read_source(str(tmp_path / "a.csv"), {})
    (tmp_path / "a.csv").write_bytes("a,y\n1,2\n".encode("utf-16"))
    with pytest.raises(BadData, match="iconv -f utf-16"):
        read_source(str(tmp_path / "a.csv"), {})
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a,y\n1,2\n" * 100)[:-10])
    with pytest.raises(BadData, match="truncated or damaged"):
        read_source(str(tmp_path / "b.csv.gz"), {})


def test_rows_with_missing_values_are_left_out_and_counted(read, capsys):
    inputs, targets, contents = read("a,b,y\n1,2,u\n,3,v\n4,5,\n6,7,w\n", missing="drop")
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2], [6, 7]], [0, 1])
    assert contents.labels == ("u", "w")
    assert "1 of 3 train samples have missing values" in capsys.readouterr().err


def test_rows_without_a_target_alone_are_left_out_by_default(read, capsys):
    for options in ({}, {"missing": "mean"}):
        inputs, targets, _ = read("a,b,y\n1,2,u\n,3,v\n4,5,\n6,7,w\n", **options)
        assert (len(inputs), targets.tolist()) == (3, [0, 1, 2])
        assert "1 of 4 rows" in capsys.readouterr().err


def test_the_mean_of_the_training_samples_stands_for_a_missing_value(tmp_path, opened):
    (tmp_path / "train.csv").write_text("a,b,y\n1,10,0\n,20,1\n5,,0\n")
    (tmp_path / "test.csv").write_text("a,b,y\n,100,1\n")
    data = opened(str(tmp_path), validation=0, options={"missing": "mean", "prepare": "off"})
    assert data.name == tmp_path.name
    assert data.train.take(torch.arange(3))[0].tolist() == [[1, 10], [3, 20], [5, 15]]
    assert data.test.take(torch.arange(1))[0].tolist() == [[3, 100]]


def test_each_fold_has_the_means_of_its_own_training_samples(tmp_path):
    (tmp_path / "a.csv").write_text("a,y\n1,0\n3,1\n,0\n8,1\n")
    data, options = str(tmp_path / "a.csv"), {"missing": "mean", "prepare": "off"}

    def work(comm):
        pool = open_pool(data, comm, options)
        file = tmp_path / "splits.npz"
        if comm.rank == 0:
            splits = [Split.of([0, 1], [2, 3], 4, "it"), Split.of([2, 3], [0, 1], 4, "it")]
            write_splits(file, splits, pool.dataset.fingerprint)
        comm.barrier()
        folds = [pool.divided(comm, 0.0, 0, (str(file), number)) for number in range(2)]
        return [[part.take(torch.arange(2))[0].tolist() for part in fold.parts] for fold in folds]

    for found in VirtualWorld(ranks=2).run(work):
        assert found == [[[[1], [3]], [[2], [8]]], [[[8], [8]], [[1], [3]]]]


def test_listed_files_are_one_data_set(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.csv").write_text("x,y\n1,cat\n")
    (tmp_path / "b" / "c.csv").write_text("x,y\n2,horse\n3,cat\n")
    listed = tmp_path / "all.txt"
    listed.write_text("# my files\nb/c.csv\n\na.csv  # the other one\n")
    contents = read_source(str(listed), {"target": "y"})
    inputs, targets = contents.parts["train"]
    assert (inputs[:].tolist(), targets.tolist()) == ([[2], [3], [1]], [1, 0, 0])
    for line in ("missing.csv", "\0", "long" * 1000, "~nobody/a.csv"):
        listed.write_text(f"# my files\na.csv\n{line}\n")
        with pytest.raises(BadData, match="names no file in line 3: there is no"):
            read_source(str(listed), {})
    inputs, _ = read_source(str(tmp_path / "*" / "c*.csv"), {"target": "y"}).parts["train"]
    assert inputs[:].tolist() == [[2], [3]]
    with pytest.raises(BadData, match="no file is called"):
        read_source(str(tmp_path / "d*.csv"), {})
    (tmp_path / "b" / "c.csv").write_text("z,y\n2,horse\n")
    listed.write_text("a.csv\nb/c.csv\n")
    with pytest.raises(BadData, match=r"c\.csv has no column 'x'"):
        read_source(str(listed), {"target": "y"})
    listed.write_text("all.txt")
    with pytest.raises(BadData, match="is a list itself"):
        read_source(str(listed), {})
    listed.write_text("# none")
    with pytest.raises(BadData, match="lists no files"):
        read_source(str(listed), {})


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "train-0.csv"),
        ("train-1.txt", "train-0.csv"),
        ("train.csv", "train-0.csv"),
        ("train.csv", "train.csv.gz"),
        ("train-0.csv", "train_0.tsv"),
    ],
)
def test_files_that_may_hold_the_same_samples_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("train-0.csv\n" if name.endswith(".txt") else "a,y\n1,0\n2,1\n")
    with pytest.raises(BadData) as caught:
        read_source(str(tmp_path), {})
    assert all(name in str(caught.value) for name in names)


def test_numbered_files_are_a_part_in_the_order_of_their_numbers(tmp_path):
    for name, value in (("train-10", 2), ("train-9", 1), ("train_old", 3)):
        (tmp_path / f"{name}.csv").write_text(f"a,y\n{value},{value / 4}\n")
    inputs, _ = read_source(str(tmp_path), {}).parts["train"]
    assert inputs[:].tolist() == [[1], [2]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some.one_of(some.binary(max_size=200), some.text('0123.,;"\n\r\ty e-', max_size=100).map(str.encode)))
def test_hostile_tables_are_read_or_refused(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    with suppress(UserError):
        inputs, targets = read_source(str(tmp_path / "a.csv"), {"target": 0}).parts["train"]
        assert len(inputs[:]) == len(targets)


def test_npy_pairs_and_folders_of_them_are_mapped(tmp_path):
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 2, 0])
    for name, array in (("x", x), ("y", y), ("x_test", x[:2]), ("y_test", y[:2]), ("other", y)):
        np.save(tmp_path / f"{name}.npy", array)
    inputs, targets = read_source(str(tmp_path / "x.npy"), {}).parts["train"]
    assert not inputs.flags.writeable  # it is the file's own memory
    assert (inputs.tolist(), targets.tolist()) == (x.tolist(), y.tolist())
    assert list(read_source(tmp_path, {}).parts) == ["train", "test"]
    with pytest.raises(BadData, match="no targets beside it"):
        read_source(str(tmp_path / "other.npy"), {})
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
    with pytest.raises(BadData, match=r"x\.npy is truncated or damaged"):
        read_source(str(tmp_path / "x.npy"), {})
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object))
    with pytest.raises(BadData, match="holds Python objects"):
        read_source(str(tmp_path / "x.npy"), {})


@pytest.mark.parametrize("first", [0, 1])
def test_a_missing_one_of_the_files_of_a_part_is_noticed(tmp_path, first):
    names = [f"train-{number:05}-of-00004.csv" for number in range(first, first + 4)]
    for name in names:
        (tmp_path / name).write_text("a,y\n1,0\n3,1\n")
    assert len(read_source(str(tmp_path), {}).parts["train"][1]) == 8
    (tmp_path / names[2]).unlink()
    with pytest.raises(BadData, match="has 3 files train-"):
        read_source(str(tmp_path), {})


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("1,2020-01-01,true,a", "2,2020-01-02,false,b"),
        ("1,,true,a", "2.5,3,,"),
        ("1,2020-01-01,true,a", "x,2020-01-02 10:00,no,b"),
        ("99999999999999999999,a,1,1", "1,b,2.5,99999999999"),
    ],
)
def test_large_files_are_read_as_small_ones(tmp_path, monkeypatch, first, later):
    """The types of their columns are looked up in the first megabyte."""
    (tmp_path / "a.csv").write_text("p,q,r,s,y\n" + f"{first},0\n" * 100_000 + f"{later},1\n" * 100_000)
    small, large = [], []
    for limit, found in ((1 << 30, small), (0, large)):
        monkeypatch.setattr("tutti.data.formats.csv._LARGE", limit)
        contents = read_source(str(tmp_path / "a.csv"), {"target": "y"})
        found += [contents.table, contents.columns, *contents.parts["train"]]
    assert small[:2] == large[:2]
    np.testing.assert_array_equal(small[2], large[2])
    np.testing.assert_array_equal(small[3], large[3])
