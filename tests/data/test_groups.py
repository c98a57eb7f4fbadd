"""The column with the group of each sample, in files of each format; in tables it is no input."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from pyarrow import feather, parquet, table

from tutti.data.columns import Columns
from tutti.data.sources import read_inputs, read_source
from tutti.errors import BadData, BadOption, UserError

PERSONS = ["ann", "bob", "ann", "cy"]
NUMBERS = [7, 8, 7, 9]


def _groups(path: Path, name: str, **options: object) -> list[object]:
    chosen: dict[str, object] = {} if path.suffix in (".h5", ".npz") else {"target": "label", "columns": "a"}
    groups = read_source(str(path), {**chosen, "group": name, **options}).groups
    assert groups is not None
    return groups.tolist()


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.arrow", "t.jsonl", "t.h5", "parts", "all.txt"])
def test_weights_are_a_column_likewise(tables: Path, name: str) -> None:
    chosen = {} if name == "t.h5" else {"target": "label", "columns": "a"}
    weights = read_source(str(tables / name), {**chosen, "weight": "number"}).weights
    assert weights["train"].tolist() == NUMBERS + NUMBERS[::-1] * (name == "all.txt")
    assert name != "parts" or weights["test"].tolist() == NUMBERS[::-1]


def test_a_column_of_weights_is_no_input(tables: Path) -> None:
    options = {"target": "label", "weight": "number"}
    assert read_source(str(tables / "t.csv"), options).columns == ("a", "person")
    with pytest.raises(BadOption, match="'number' is the group or the weight"):
        read_source(str(tables / "t.csv"), {**options, "columns": ["a", "number"]})
    (tables / "new.csv").write_text("a,person\n1,ann\n2,bob\n")
    assert read_inputs(str(tables / "new.csv"), {"weight": "number"}).columns == ("a", "person")


def _line(a: float, person: str, number: int, label: int) -> str:
    return json.dumps({"a": a, "person": person, "number": number, "label": label}) + "\n"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    columns = {"a": [1.0, 2.0, 3.0, 4.0], "person": PERSONS, "number": NUMBERS, "label": [0, 1, 0, 1]}
    parquet.write_table(table(columns), tmp_path / "t.parquet")
    feather.write_feather(table(columns), tmp_path / "t.arrow")
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    for name, some in (("t.csv", rows), ("u.csv", rows[::-1])):
        (tmp_path / name).write_text("\n".join([",".join(columns), *some]) + "\n")
    (tmp_path / "t.jsonl").write_text("".join(map(_line, *columns.values())))
    (tmp_path / "all.txt").write_text("t.csv\nu.csv\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train.csv").write_bytes((tmp_path / "t.csv").read_bytes())
    (tmp_path / "parts" / "test.csv").write_bytes((tmp_path / "u.csv").read_bytes())
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["x_train"], file["y_train"] = np.eye(4), np.arange(4)
        file["person"], file["number"] = PERSONS, NUMBERS
    np.savez(tmp_path / "t.npz", x=np.eye(4), y=np.arange(4), person=PERSONS, number=NUMBERS)
    return tmp_path


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.arrow", "t.jsonl", "t.h5", "t.npz", "parts"])
def test_groups_are_texts_or_numbers(tables: Path, name: str) -> None:
    assert _groups(tables / name, "person") == PERSONS
    assert _groups(tables / name, "number") == NUMBERS


@pytest.mark.parametrize("name", ["all.txt", "[tu].csv"])
def test_groups_of_several_files_come_in_their_order(tables: Path, name: str) -> None:
    assert _groups(tables / name, "person") == PERSONS + PERSONS[::-1]


@pytest.mark.parametrize("gap", [",2,cat", "2,2,"], ids=["input", "target"])
def test_rows_that_are_left_out_leave_no_group(tmp_path: Path, gap: str) -> None:
    (tmp_path / "t.csv").write_text(f"1,1,cat\n{gap}\n3,3,dog\n4,4,cat\n")
    options = {"target": 2, "group": "1", "missing": "drop"}
    contents = read_source(str(tmp_path / "t.csv"), options)
    inputs, _ = contents.parts["train"]
    assert contents.groups is not None
    assert contents.groups.tolist() == inputs[:][:, 0].tolist() == [1, 3, 4]


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.arrow", "t.jsonl", "all.txt", "[tu].csv", "parts"])
def test_the_column_is_no_input(tables: Path, name: str) -> None:
    data, options = str(tables / name), {"target": "label", "group": "number"}
    assert read_source(data, options).columns == ("a", "person")
    assert read_source(data, {**options, "columns": ["a"]}).columns == ("a",)
    assert read_source(data, {"target": "label", "columns": ["a", "number"]}).columns == ("a", "number")
    with pytest.raises(BadOption, match="column 'number' is the group"):
        read_source(data, {**options, "columns": ["a", "number"]})
    alone = read_source(data, {"target": "number", "group": "person"})
    assert alone.columns == ("a", "label")


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("t.csv", "persons", r"no column 'persons' \(--group-by\); did you mean 'person'"),
        ("t.parquet", "persons", "did you mean 'person'"),
        ("t.jsonl", "persons", "did you mean 'person'"),
        ("gaps.jsonl", "person", "no value in row 2 of the column 'person'"),
        ("short.h5", "person", "3 groups, but 4 samples"),
        ("t.h5", "persons", "no data set 'persons'"),
        ("t.npz", "persons", "no array 'persons'"),
        ("gaps.csv", "person", "no value in row 2 of the column 'person', by which samples are grouped"),
    ],
)
def test_a_column_that_is_not_there_is_refused(tables: Path, name: str, column: str, message: str) -> None:
    (tables / "gaps.csv").write_text("a,person,label\n1,ann,0\n2,,1\n")
    (tables / "gaps.jsonl").write_text('{"a": 1, "person": "ann", "label": 0}\n{"a": 1, "label": 1}\n')
    with h5py.File(tables / "short.h5", "w") as file:
        file["x_train"], file["y_train"], file["person"] = np.eye(4), np.arange(4), PERSONS[:3]
    with pytest.raises(UserError, match=message):
        _groups(tables / name, column)


def test_the_column_is_no_input_by_name_either(tmp_path: Path) -> None:
    lines = [{"image": [[0.0, 1.0]], "age": 36.0, "person": "ann", "label": at} for at in (0, 1)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    inputs, _ = read_source(str(tmp_path / "t.jsonl"), {"group": "person"}).parts["train"]
    assert isinstance(inputs, Columns)
    assert inputs.names == ("image", "age")


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.jsonl", "t.h5", "all.txt"])
def test_a_misspelt_column_is_refused_in_training_too(tables: Path, name: str) -> None:
    options = {} if name == "t.h5" else {"columns": "a", "target": "label"}
    message = r"no (column|data set) 'nmuber'.*; (did you mean 'number'|it has number)"
    with pytest.raises(BadData, match=message):
        read_source(str(tables / name), {**options, "group": "nmuber"})


def test_what_is_to_be_predicted_may_lack_the_column(tables: Path) -> None:
    (tables / "new.csv").write_text("a,label\n1,0\n2,1\n")
    found = read_inputs(str(tables / "new.csv"), {"target": "label", "group": "person"})
    assert found.columns == ("a",)
