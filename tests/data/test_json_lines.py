"""JSON lines and lists of objects: keys as columns, lists as inputs, and what is refused."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

from tutti.data.columns import Columns
from tutti.data.sources import read_source
from tutti.errors import BadData, NotFinite


@pytest.fixture
def read(tmp_path):
    """Writes samples, or a text, as a file, and reads its training part."""

    def write_and_read(samples, name="a.jsonl", **options):
        text = samples if isinstance(samples, str) else "".join(json.dumps(one) + "\n" for one in samples)
        (tmp_path / name).write_text(text)
        contents = read_source(str(tmp_path / name), options)
        inputs, targets = contents.parts["train"]
        return (inputs if isinstance(inputs, Columns) else inputs[:]), targets, contents

    return write_and_read


def test_keys_are_columns_and_texts_classes(read):
    samples = [{"a": 1, "b": 2.5, "y": "v"}, {"b": -1e2, "a": 1, "y": "u"}]
    inputs, targets, contents = read(samples)
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2.5], [1, -100]], [1, 0])
    assert (contents.labels, contents.columns, contents.name) == (("u", "v"), ("a", "b"), "a")
    for text in (json.dumps(samples), json.dumps(samples, indent=1)):
        again, others, listed = read(text, "a.json")
        assert np.array_equal(again, inputs)
        assert np.array_equal(others, targets)
        assert (listed.labels, listed.columns) == (contents.labels, contents.columns)


def test_lists_are_inputs_or_targets_of_any_shape(read):
    tokens, _, contents = read([{"x": [1, 2, 3], "y": 0}, {"x": [4, 5, 6], "y": 1}])
    assert (tokens.tolist(), tokens.dtype, contents.columns) == ([[1, 2, 3], [4, 5, 6]], np.int64, ())
    inputs, targets, _ = read(
        [{"x": [[1, 2.5]], "y": [0.5, 1]}, {"x": [[3, None]], "y": [1, 2]}], missing="mean"
    )
    assert (inputs.shape, inputs[0].tolist(), targets.tolist()) == ((2, 1, 2), [[1, 2.5]], [[0.5, 1], [1, 2]])


def test_lists_of_unequal_length_are_sequences(read, opened, tmp_path):
    samples = [{"x": list(range(number % 3 + 1)), "y": number % 2} for number in range(12)]
    read(samples)
    part = opened(str(tmp_path / "a.jsonl"), validation=0).train
    inputs, lengths = part.take(torch.arange(3))[0]
    assert (inputs.tolist(), lengths.tolist()) == ([[0, 0, 0], [0, 1, 0], [0, 1, 2]], [1, 2, 3])


def test_blocks_of_whole_numbers_and_of_floats_are_one_column(read):
    values = [*range(200_000), 0.5]
    samples = [{"x": [value], "y": value % 2 if value != 0.5 else None} for value in values]
    inputs, targets, _ = read(samples, missing="drop")
    assert (inputs[:, 0].tolist(), len(targets)) == (values[:-1], 200_000)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.zst"])
def test_packed_texts_are_read(tmp_path, name):
    content = b'{"x":1,"y":0}\n{"x":2,"y":1}\n' if "json" in name else b"x,y\n1,0\n2,1\n"
    if name.endswith("gz"):
        packed = gzip.compress(content)
    else:
        packed = pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True)
    path = tmp_path / name
    path.write_bytes(packed)
    contents = read_source(str(path), {})
    assert (contents.name, contents.parts["train"][0][:].tolist()) == ("a", [[1], [2]])
    path.write_bytes(packed[:-5])
    with pytest.raises(BadData, match=rf"{name} is (broken|truncated)"):
        read_source(str(path), {})


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{"a": 1, "y": 0}, {"a": "two", "y": 1}], r"broken: .*/a.* changed from number to string in row 1"),
        ([{"x": [[1]], "y": 0}, {"x": [[1, 2]], "y": 1}], r"several lengths in the lists of the column 'x'"),
        ([{"x": [1], "y": [0]}, {"x": [1], "y": [0, 1]}], r"lists of several lengths, in 'y'"),
        ([{"x": [1], "y": 0}, {"y": 1}], r"no list in some rows of the column 'x'"),
        ([{"a": [1], "b": "u", "y": 0}], r"type string in the column 'b'.*--data.columns a"),
        ([{"a": 1, "y": None}, {"a": 1}], "no rows with a target"),
        ([{"a": 10**400, "y": 0}], "too large"),
        ([{"x": [1e300], "y": 0}, {"x": [1], "y": 1}], "or numbers too large for float32"),
        ([{"x": 1e300, "y": 0}, {"x": 1, "y": 1}], "or numbers too large for float32"),
        ([{"a": 1, "b": 2}], "no column with a name such as 'target'"),
        ('{"a": 1, "y": 0}\n{"a": 1', "is broken: "),
        ("[1, 2]\n[1]\n[1, 2]", "is broken: "),
        ("[" * 100_000, "is broken: "),
        ("3\n", "is broken: "),
        ('[{"a": 1, "y": 0}, {"a": 1', "is broken: "),
        ('[{"a": 1, "y": 0}] 3', "is broken: "),
    ],
)
def test_what_cannot_be_read_is_named(read, samples, said):
    with pytest.raises((BadData, NotFinite), match=said):
        read(samples)


def test_several_keys_of_which_one_is_a_list_are_inputs_by_name(read):
    samples = [
        {
            "image": [[0.5, number]],
            "user": number,
            "age": number / 2,
            "words": [number] * (number % 3),
            "y": number % 2,
        }
        for number in range(9)
    ]
    samples[4]["y"] = None
    inputs, targets, contents = read(samples, missing="drop")
    assert (inputs.names, contents.columns) == (("image", "user", "age", "words"), ())
    image, user, age, words = inputs.columns
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert image.rows[:].tolist() == [[[0.5, number]] for number in kept]
    assert (user.rows[:].tolist(), user.rows.dtype) == ([[number] for number in kept], np.int64)
    assert age.rows[:].tolist() == [[number / 2] for number in kept]
    assert words.rows[:, 1].tolist() == [number % 3 for number in kept]
    assert words.values[:].tolist() == [number for number in kept for _ in range(number % 3)]
    assert targets.tolist() == [number % 2 for number in kept]
    some, _, _ = read(samples, missing="drop", columns=["words", "age"])
    assert some.names == ("words", "age")
