"""Parquet and Arrow files: numbers, lists and pictures; and the built-in set that comes as such."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from tutti.data.sources import read_source
from tutti.errors import BadData, BadOption, UnknownName

arrow = pytest.importorskip("pyarrow", reason="needs the extra 'data'")
Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")
feather = pytest.importorskip("pyarrow.feather")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def read(tmp_path):
    """Writes columns as a file of several blocks, and reads its training part."""

    def write_and_read(columns, form="parquet", schema=None, **options):
        path, table = tmp_path / f"a.{form}", arrow.table(columns, schema=schema)
        if form == "parquet":
            parquet.write_table(table, path, row_group_size=2)
        else:
            feather.write_feather(table, path, chunksize=2)
        contents = read_source(str(path), options)
        inputs, targets = contents.parts["train"]
        return inputs[:], targets, contents

    return write_and_read


def png(value, size=(4, 3), mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size, (value,) * 3 if mode == "RGB" else value).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("form", ["parquet", "feather"])
def test_columns_of_numbers_lists_and_texts(read, form):
    table = {"a": [1, 2, None, 4, 5], "b": [0.5, 1.5, 2.5, 3.5, 4.5], "y": ["u", "v", "u", None, "w"]}
    inputs, targets, contents = read(table, form, target="y", missing="drop")
    assert (inputs.tolist(), targets.tolist()) == ([[1, 0.5], [2, 1.5], [5, 4.5]], [0, 1, 2])
    assert (contents.columns, contents.labels) == (("a", "b"), ("u", "v", "w"))
    inputs, _, _ = read({"x": [[1, 2], [3, 4], [5, 6]], "y": [0, 1, 2]}, form)
    assert (inputs.tolist(), inputs.dtype) == ([[1, 2], [3, 4], [5, 6]], np.int64)
    inputs, _, _ = read({"x": [[[1.0], [2.0]], [[3.0], [4.0]]], "y": [0, 1]}, form)
    assert inputs.tolist() == [[[1], [2]], [[3], [4]]]


@pytest.mark.parametrize(
    ("values", "found", "labels"),
    [
        ([True, False, True], [1, 0, 1], (False, True)),
        ([Decimal("1.50"), Decimal("2.25"), Decimal(3)], [1.5, 2.25, 3], ()),
        (arrow.array(["v", "u", "v"]).dictionary_encode(), [1, 0, 1], ("u", "v")),
    ],
)
def test_targets_of_every_type_are_read(read, values, found, labels):
    _, targets, contents = read({"a": [1, 2, 3], "y": values})
    assert (targets.tolist(), contents.labels) == (found, labels)


def test_parts_whose_numbers_stand_for_other_classes_are_refused(tmp_path):
    for part, names in (("train", ["ant", "bee", "cow"]), ("test", ["bee", "cow"])):
        about = json.dumps({"info": {"features": {"label": {"names": names}}}})
        table = arrow.table({"a": [0.5, 1.5], "label": [0, 1]}, metadata={"huggingface": about})
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    with pytest.raises(
        BadData, match=r"the test part .* has other class names than the train part .*, bee, cow and not ant"
    ):
        read_source(str(tmp_path), {})


def test_lists_of_several_lengths_are_sequences(tmp_path, opened):
    tokens = [[1, 2], [3], [], [4, 5, 6], [7]]
    table = arrow.table({"tokens": tokens, "target": [0.5, None, 1.5, 2.5, 3.5]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    part = opened(str(tmp_path / "a.parquet"), validation=0, options={"missing": "drop"}).train
    (found, lengths), targets = part.take(torch.arange(4))
    assert targets.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert (found.tolist(), lengths.tolist()) == ([[1, 2, 0], [0] * 3, [4, 5, 6], [7, 0, 0]], [2, 0, 3, 1])
    pairs = arrow.table({"x": [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], "y": [0.5, 1.25]})
    parquet.write_table(pairs, tmp_path / "b.parquet")
    part = opened(str(tmp_path / "b.parquet"), validation=0).train
    assert part.take(torch.arange(2))[0][0].tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_a_frame_is_a_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2, 3], "b": [0.5, None, 2.0], "kind": ["cow", "ant", "cow"]})
    frame.index = [7, 8, 9]
    for table in (frame, arrow.Table.from_pandas(frame, preserve_index=False)):
        found = read_source(table, {"target": "kind", "missing": "mean"})
        inputs, targets = found.parts["train"]
        assert (found.name, found.columns, found.labels) == (type(table).__name__, ("a", "b"), ("ant", "cow"))
        assert inputs[:, 0].tolist() == [1, 2, 3]
        assert np.isnan(inputs[1, 1])
        assert targets.tolist() == [1, 0, 1]
    inputs, _ = read_source(frame, {"target": "a", "columns": "b", "missing": "drop"}).parts["train"]
    assert inputs[:].tolist() == [[0.5], [2.0]]
    with pytest.raises(BadData, match=r"the DataFrame has no column 'c' \(--data.target\)"):
        read_source(frame, {"target": "c"})
    with pytest.raises(BadData, match=r"the DataFrame has values of type .*string in the column 'kind'"):
        read_source(frame, {"target": "a", "prepare": "off"})
    with pytest.raises(BadData, match="the DataFrame is no table that Arrow can hold"):
        read_source(pandas.DataFrame({"a": [1, "x"], "y": [0, 1]}), {})
    with pytest.raises(UnknownName, match="unknown option 'size'"):
        read_source(frame, {"size": 3})


def test_pictures_are_decoded_once(read, tmp_path, monkeypatch):
    rows = [{"bytes": png(value), "path": None} for value in (7, 8, 9)]
    inputs, targets, contents = read({"img": rows, "label": [1, 0, 1]})
    assert (inputs.shape, inputs.dtype) == ((3, 3, 3, 4), np.uint8)
    assert (inputs[:, 0, 0, 0].tolist(), targets.tolist()) == ([7, 8, 9], [1, 0, 1])
    monkeypatch.setattr("tutti.data.pictures._decode", None)
    assert np.array_equal(
        read_source(contents_path := str(tmp_path / "a.parquet"), {}).parts["train"][0], inputs
    )
    assert contents.name in contents_path


def test_pictures_that_cannot_be_read_are_named_and_those_without_a_target_left_out(read):
    table = {"img": [png(1), b"no picture", png(3), None], "label": ["a", "b", "c", "a"]}
    with pytest.raises(
        BadData, match=r"2 of 4 pictures of .*a\.parquet cannot be read \(in row 2: .*in row 4: "
    ):
        read(table)
    table = {"img": [png(1), png(2), png(3)], "label": ["a", None, "c"]}
    inputs, targets, contents = read(table, missing="drop")
    assert (inputs[:, 0, 0, 0].tolist(), targets.tolist(), contents.labels) == ([1, 3], [0, 1], ("a", "c"))


def test_pictures_of_several_sizes_are_brought_to_one(read):
    table = {"img": [png(1), png(2, (8, 6), "L")], "label": [0, 1]}
    with pytest.raises(BadData, match=r"in row 2 of .* has 6 x 8 pixels, in row 1 3 x 4; .*--data.size"):
        read(table)
    inputs, _, _ = read(table, size=5)
    assert inputs.shape == (2, 3, 5, 5)
    assert inputs[1].tolist() == np.full((3, 5, 5), 2).tolist()
    with pytest.raises(BadOption, match="give the height and the width"):
        read(table, size=0)


def test_cifar10_is_read_from_the_folder_of_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TUTTI_DATA", str(tmp_path))
    with pytest.raises(BadData, match=r"put train\.parquet and test\.parquet there"):
        read_source("cifar10", {})
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for part, values in (("train", [3, 4, 5]), ("test", [6])):
        rows = [{"bytes": png(value), "path": None} for value in values]
        parquet.write_table(arrow.table({"img": rows, "label": values}), folder / f"{part}.parquet")
    contents = read_source("cifar10", {})
    assert (contents.name, contents.classes, contents.labels[3]) == ("cifar10", 10, "cat")
    assert contents.parts["train"][1].tolist() == [3, 4, 5]
    assert contents.parts["test"][0][:, 0, 0, 0].tolist() == [6]


def test_a_damaged_file_is_named_in_one_clean_line(tmp_path):
    parquet.write_table(arrow.table({"x": [0.5, 1.5], "label": [0, 1]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-200] + b"\x0f" * 192 + content[-8:])
    with pytest.raises(BadData, match=r"a\.parquet is truncated or damaged") as caught:
        read_source(str(tmp_path / "a.parquet"), {})
    assert str(caught.value).isprintable()


def test_a_page_that_does_not_match_its_checksum_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    table = arrow.table({"x": [0.5, 1.5], "label": [0, 1]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(table, path, write_page_checksum=True, **options)
    path.write_bytes(path.read_bytes().replace(np.float64(1.5).tobytes(), np.float64(2.5).tobytes()))
    with pytest.raises(BadData, match=r"a\.parquet"):
        read_source(str(path), {})


def test_a_file_is_read_where_nothing_else_has_imported_pyarrow(tmp_path):
    path = str(tmp_path / "t.parquet")
    parquet.write_table(arrow.table({"a": [1.0, 2.0], "kind": ["x", "y"]}), path)
    code = f"from tutti.data.sources import read_source; read_source({path!r}, {{'target': 'kind'}})"
    subprocess.run([sys.executable, "-c", code], check=True)
