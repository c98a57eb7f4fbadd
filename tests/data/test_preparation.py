"""Tables of numbers, texts and dates: how they are read, fitted on the training rows, and applied."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import DataSet, open_pool
from tutti.data.arrays import keeping_doubles
from tutti.data.contents import from_keys, to_keys
from tutti.data.fitting import CONSTANT, IDENTIFIER, KEY, MISSING, ROW_NUMBERS, SIGNED, fit
from tutti.data.preparation import date_parts, prepared
from tutti.data.sources import read_source
from tutti.data.tables import LIKE
from tutti.errors import BadData, UserError
from tutti.records.json_lines import parse_record, to_json
from tutti.records.preparation import DATE, OTHER, Preparation, Table, TableColumn, TableInputs
from tutti.records.splits import Split, write_splits
from tutti.run.summary_lines import table as in_words

NAN = float("nan")
DAY = 19_753  # 2024-01-31


def made(rows: int = 200) -> pandas.DataFrame:
    """Make a table with columns of every kind, and gaps."""
    random = np.random.default_rng(5)
    frame = pandas.DataFrame(
        {
            "age": random.integers(18, 80, rows).astype(float),
            "income": random.normal(3e4, 1e4, rows),
            "city": random.choice(["Oslo", "Rome", "Vaduz"], rows),
            "member": random.random(rows) < 0.5,
            "zip": [f"z{one}" for one in random.integers(0, 50, rows)],
            "joined": [
                datetime(2024, 1, 1) + timedelta(days=int(one)) for one in random.integers(0, 900, rows)
            ],
            "y": random.choice(["no", "yes"], rows),
        }
    )
    frame.loc[::7, "age"] = None
    frame.loc[3::11, "city"] = None
    return frame


def stored(frame: pandas.DataFrame, **options: object) -> tuple[np.ndarray, Table]:
    contents = read_source(frame, {"target": "y", **options})
    assert contents.table is not None
    return contents.parts["train"][0][:], contents.table


def fitted(frame: pandas.DataFrame, embeds: bool = False, **options: object) -> Preparation:
    rows, table = stored(frame, **options)
    return fit(rows.__getitem__, np.arange(len(rows)), table, len(rows), embeds=embeds)


def test_frames_come_with_targets_beside_them_or_with_a_test_frame() -> None:
    frame = made()
    x, y, first, rest = frame.drop(columns="y"), frame["y"], slice(0, 150), slice(150, 200)
    whole = read_source(frame, {"target": "y"})
    for data in ((x, y), (x, y.to_numpy()), (x, y.to_frame())):
        found = read_source(data, {})
        assert (found.table, found.labels) == (whole.table, ("no", "yes"))
        assert found.parts["train"][1].tolist() == whole.parts["train"][1].tolist()
    pair = frame[first], frame[rest]
    for data in (pair, {"test": pair[1], "train": pair[0]}, ((x[first], y[first]), (x[rest], y[rest]))):
        found = read_source(data, {"target": "y"})
        assert [len(targets) for _, targets in found.parts.values()] == [150, 50]
        assert found.table is not None
        assert found.table.columns[2].texts == ("Oslo", "Rome", "Vaduz")
    for data, options, error in (
        ((x, y[:5]), {}, "5 targets for 200 rows"),
        ((x, y), {"target": "age"}, "target is age"),
        ((frame, y), {}, "two columns called 'y'"),
    ):
        with pytest.raises(UserError, match=error):
            read_source(data, options)


FILES: dict[str, Callable[[pandas.DataFrame, Path], object]] = {
    "a.csv": lambda frame, path: frame.to_csv(path, index=False),
    "a.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t", decimal=","),
    "a.parquet": lambda frame, path: frame.to_parquet(path, index=False),
    "a.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, date_format="iso"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_table(tmp_path: Path, name: str) -> None:
    FILES[name](made(), tmp_path / name)
    with keeping_doubles(True):
        rows, table = stored(made())
        contents = read_source(str(tmp_path / name), {"target": "y"})
    assert contents.table == table
    assert [column.kind for column in table.columns] == ["number", "number", "text", "number", "text", "date"]
    np.testing.assert_allclose(contents.parts["train"][0][:], rows, rtol=1e-12)


def test_numbers_and_texts_become_what_scikit_learn_makes_of_them() -> None:
    frame = made()
    columns = ["age", "income", "city"]
    transformer = make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), ["age", "income"]),
        (OneHotEncoder(), ["city"]),
        sparse_threshold=0,
    )
    expected = transformer.fit_transform(frame)
    with keeping_doubles(True):
        rows, table = stored(frame, columns=columns)
    preparation = fit(rows.__getitem__, np.arange(len(rows)), table, len(rows))
    found = prepared(preparation, table).apply(torch.from_numpy(rows)).numpy()
    assert preparation.inputs == TableInputs(
        2, 1 + 4
    )  # a flag for missing ages; missing cities are a category
    known = ~frame["age"].isna().to_numpy()
    # scikit-learn takes mean and deviation with the medians in their places.
    ages = frame["age"][known]
    np.testing.assert_allclose(found[known, 0], (ages - ages.mean()) / ages.std(ddof=0), rtol=1e-10)
    np.testing.assert_allclose(found[~known, 0], (ages.median() - ages.mean()) / ages.std(ddof=0), rtol=1e-10)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-10)
    assert (found[:, 2] == ~known).all()
    assert (found[:, 3:] == expected[:, 2:]).all()


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("constant", [3.0] * 60, CONSTANT),
        ("constant text", ["a"] * 60, CONSTANT),
        ("constant or missing", [3.0, None] * 30, None),
        ("missing", [None] * 60, MISSING),
        ("numbered from 0", [*range(60)], ROW_NUMBERS),
        ("numbered from 1, in any order", [*range(60, 0, -1)], ROW_NUMBERS),
        ("customers, in the order of the rows", [*range(7000, 7180, 3)], ROW_NUMBERS),
        ("amounts", [*range(159, 99, -1)], None),
        *((name, [*range(159, 99, -1)], IDENTIFIER) for name in ("id", "user_id", "PassengerId", "Order No")),
        *((name, [*range(159, 99, -1)], None) for name in ("piano", "paid")),
        ("area_code", [*range(159, 129, -1)] * 2, None),
        ("fractions", [one / 2 for one in range(60)], None),
        ("numbered twice", [*range(30)] * 2, None),
        ("key", [f"k{one}" for one in range(60)], KEY),
        ("signs that are no numbers here", [f"{one} $" for one in range(60)], SIGNED),
        ("texts", [f"k{one % 40}" for one in range(60)], None),
    ],
)
def test_columns_that_tell_nothing_are_left_out(name: str, values: list[object], reason: str | None) -> None:
    frame = pandas.DataFrame({name: values, "a": [0.5, 1.5, 2.5] * 20, "y": [0, 1] * 30})
    for embeds in (False, True):
        assert fitted(frame, embeds).left_out == ({} if reason is None else {name: reason})
    chosen = fitted(frame, columns=[name, "a"])
    assert chosen.left_out == ({name: reason} if reason in (CONSTANT, MISSING) else {})


def test_columns_of_small_tables_and_an_only_column_stay() -> None:
    few = pandas.DataFrame({"number": [0, 1, 2, 3], "name": ["a", "b", "c", "d"], "y": [0, 1, 0, 1]})
    assert fitted(few).names == ("number", "name")
    assert fitted(pandas.DataFrame({"x": range(50), "y": [0, 1] * 25})).names == ("x",)
    with pytest.raises(BadData, match=r"no column of the table is of use .*: x \(constant\)"):
        fitted(pandas.DataFrame({"x": [1] * 50, "y": [0, 1] * 25}))


def test_many_texts_are_category_numbers_or_the_most_frequent_ones() -> None:
    texts = [f"t{one}" for one in range(40) for _ in range(one + 1)]
    frame = pandas.DataFrame({"t": [*texts, None], "y": [n % 2 for n in range(len(texts) + 1)]})
    rows, table = stored(frame)
    code = {text: n for n, text in enumerate(table.columns[0].texts)}
    given = torch.tensor([[code["t39"]], [code["t0"]], [NAN]])

    one_hot = fit(rows.__getitem__, np.arange(len(rows)), table, len(rows))
    assert one_hot.inputs == TableInputs(0, 32)
    assert prepared(one_hot, table).apply(given).nonzero().tolist() == [[0, 0], [1, 30], [2, 31]]

    embedded = fit(rows.__getitem__, np.arange(len(rows)), table, len(rows), embeds=True)
    assert embedded.inputs == TableInputs(0, 0, (41,))  # others, 39 texts with two rows or more, gaps
    numbers = prepared(embedded, table).apply(given).flatten().tolist()
    assert numbers == [1 + embedded.columns[0].categories.index("t39"), 0, 40]


def test_texts_of_other_data_are_matched_by_value() -> None:
    preparation = fitted(pandas.DataFrame({"t": ["b", "a"], "n": [1.0, 3.0], "y": [0, 1]}))
    other = Table((TableColumn("n", "number"), TableColumn("t", "text", ("a", "b", "c"))))
    rows = torch.tensor([[2.0, 0], [3, 1], [5, 2], [NAN, NAN]])
    found = prepared(preparation, other).apply(rows)
    assert found.tolist() == [[0, 1, 0], [1, 0, 1], [3, 0, 0], [0, 0, 0]]
    with pytest.raises(BadData, match="no column 'n'"):
        prepared(preparation, replace(other, columns=other.columns[1:]))
    with pytest.raises(BadData, match="column 't' holds values of the kind number"):
        prepared(preparation, Table((other.columns[0], TableColumn("t", "number"))))


@given(some.datetimes(datetime(1600, 1, 1), datetime(2900, 1, 1)))
def test_parts_of_dates_are_those_of_the_calendar(when: datetime) -> None:
    days = torch.tensor([[(when - datetime(1970, 1, 1)) / timedelta(days=1)]], dtype=torch.float64)
    year, hour, month, weekday = (one.item() for one in date_parts(days))
    assert (year, month + 1, weekday) == (when.year, when.month, when.weekday())
    assert hour == pytest.approx(
        (when - datetime(when.year, when.month, when.day)) / timedelta(hours=1), abs=1e-3
    )


def test_dates_become_numbers_months_and_weekdays() -> None:
    days = ["2024-01-31", "2023-02-01"]  # a Wednesday, and another
    preparation = fitted(pandas.DataFrame({"day": days, "y": [0, 1]}))
    assert preparation.columns[0].mean == ((DAY + DAY - 364) / 2, 2023.5)
    table = Table((TableColumn("day", "date"),))
    found = prepared(preparation, table).apply(torch.tensor([[float(DAY)], [DAY - 364.0]]))
    assert found[:, :2].tolist() == [[1, 1], [-1, -1]]
    assert found[:, 2:].nonzero().tolist() == [[0, 0], [0, 14], [1, 1], [1, 14]]
    timed = fitted(pandas.DataFrame({"day": [f"{day} 06:00" for day in days], "y": [0, 1]}))
    assert timed.columns[0].mean[2] == 6


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["31.1.2024", "01.02.2023"], "date"),
        (["31/01/2024", "01/02/2023"], "date"),
        (["01/31/2024", "02/01/2023"], "date"),
        (["31.1.2024 12:30", "01.02.2023 00:00"], "date"),
        (["2024-01-31T12:30:00Z", "2023-02-01T00:00:00Z"], "date"),
        (["01/02/2024", "03/04/2023"], "text"),  # of which month?
        (["31.1.24", "01.02.23"], "text"),
        (["31.1.2024", "soon"], "text"),
        (["31.1.2024", "30.02.2024"], "text"),
        (["01/31/2024 12:30", "04/31/2023 12:30"], "text"),
    ],
)
def test_texts_are_dates_where_one_form_fits_all(texts: list[str], kind: str) -> None:
    rows, table = stored(pandas.DataFrame({"day": texts, "y": [0, 1]}))
    assert table.columns[0].kind == kind
    if kind == "date":
        assert np.floor(rows[:, 0]).tolist() == [DAY, DAY - 364]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["$1,234.50", "-$5"], [1234.5, -5]),
        (["12%", "7 %", "."], [12, 7, NAN]),
        (["1.5", "-", "2"], [1.5, NAN, 2]),
        (["€5", "$5"], ["$5", "€5"]),
        (["5%", "0.05"], ["0.05", "5%"]),
        (["1,234", "-"], ["-", "1,234"]),
        (["007", "-"], ["-", "007"]),
        (["-", "a"], ["-", "a"]),
        (["1", "2", "3a"] * 50, ["1", "2", "3a"]),
        (["1", "2"] * 150 + ["many"], ["1", "2", "many"]),
        (["1.5", "2"] * 20 + ["many"], "row 41 'many'"),
        (["2020-01-31", "2021-01-01"] * 20 + ["0000-00-00"], "row 41 '0000-00-00'"),
        (["$1,000.50", "$7"] * 20 + ["seven"], "row 41 'seven'"),
        (["31.01.2020", "01.02.2021"] * 20 + ["soon"], "row 41 'soon'"),
        (["31.01.2020", "01.02.2021"] * 20 + ["30.02.2021"], "row 41 '30.02.2021'"),
    ],
)
def test_numbers_with_signs_are_read_and_mistakes_refused(
    texts: list[str], found: list[object] | str
) -> None:
    frame = pandas.DataFrame({"x": texts, "y": [n % 2 for n in range(len(texts))]})
    if isinstance(found, str):
        with pytest.raises(BadData, match=found):
            stored(frame)
        return
    rows, table = stored(frame)
    assert table.columns[0].kind == ("text" if isinstance(found[0], str) else "number")
    np.testing.assert_array_equal(table.columns[0].texts or rows[:, 0], found)


def test_columns_are_read_as_those_of_the_training() -> None:
    like = (
        *(TableColumn("zip", "text"), TableColumn("day", "date", form="%d/%m/%Y")),
        *(TableColumn("n", "number"), TableColumn("gone", "text")),
    )
    signed = pandas.DataFrame({"n": ["$7", "-"], "y": [0, 1]})
    np.testing.assert_array_equal(stored(signed, **{LIKE: like[2:3]})[0], [[7], [NAN]])
    frame = pandas.DataFrame(
        {"more": [1], "n": [None], "gone": [None], "day": ["01/02/2023"], "zip": [7], "y": [0]}
    )
    rows, table = stored(frame, classes=2, **{LIKE: like})
    assert [(column.kind, column.texts) for column in table.columns] == [
        *(("text", ("7",)), ("date", ()), ("number", ()), ("text", ())),
    ]
    np.testing.assert_array_equal(rows, [[0, DAY - 364, NAN, NAN]])
    with pytest.raises(BadData, match=r"the column 'n' .* of the kind number: .*'x'"):
        stored(frame.assign(n="x"), classes=2, **{LIKE: like})
    days = pandas.DataFrame({"day": ["01/02/2023"] * 5 + ["soon", "later"], "y": range(7)})
    with pytest.raises(BadData, match=r"the column 'day' .*years of four digits"):
        stored(days, **{LIKE: like[1:2]})


@pytest.mark.parametrize("doubles", [False, True])
def test_numbers_that_float32_rounds_are_named(doubles: bool, capsys: pytest.CaptureFixture[str]) -> None:
    n = np.arange(100.0)
    table = {"ts": 1.7e9 + n, "fine": 1e6 + n, "same": 1e9, "none": None, "y": 1e9 + n / 2}
    with keeping_doubles(doubles):
        read_source(pandas.DataFrame(table), {"target": "y"})
    told = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ([] if doubles else ["ts", "the target 'y'"])


def test_texts_without_a_category_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("t,y\na,0\nb,1\nc,0\nb,1\n,1\n")
    read_source(str(tmp_path / "a.csv"), {LIKE: (TableColumn("t", "text", ("a", "c", OTHER)),)})
    assert "2 of 5 values of 't' are no category of the model" in capsys.readouterr().err


def test_texts_can_be_left_out(opened: Callable[..., DataSet]) -> None:
    data = opened(made(), options={"target": "y", "text": "drop"})
    assert data.columns == ("age", "income", "member", "joined")
    preparation = data.train.scale.preparation
    assert preparation is not None
    assert preparation.left_out == {"city": "3 texts", "zip": "50 texts"}
    assert in_words(preparation) == (
        "table: 3 numbers, 1 date; gaps in 1 column become the median; left out: city (3 texts), "
        "zip (50 texts)"
    )


@pytest.mark.parametrize(("missing", "filled"), [("auto", 2.0), ("mean", 4.0)])
def test_gaps_become_the_median_or_the_mean(
    opened: Callable[..., DataSet], missing: str, filled: float
) -> None:
    frame = pandas.DataFrame({"a": [1.0, 2, 9, None], "y": [0, 1, 0, 1]})
    data = opened(frame, validation=0, options={"missing": missing})
    mean, std = 4.0, np.std([1, 2, 9])
    found = data.train.take(torch.tensor([3]))[0]
    np.testing.assert_allclose(found, [[(filled - mean) / std, 1]], atol=1e-6)
    assert len(opened(frame, validation=0, options={"missing": "drop"}).train) == 3


def test_nothing_of_a_held_out_row_enters_the_preparation_of_a_fold(tmp_path: Path) -> None:
    frame = made(60)
    plain = {"age": 20.0, "income": 1.0, "city": "Rome", "member": True, "zip": "z1"}
    frame.loc[59, [*plain]] = [*plain.values()]
    planted = frame.copy()
    planted.loc[59, ["age", "income", "city", "zip"]] = [1e6, NAN, "planted", "planted"]

    def preparations(data: pandas.DataFrame, name: str) -> list[Preparation | None]:
        def work(comm):
            pool = open_pool(data, comm, {"target": "y"})
            if comm.rank == 0:
                rows = np.arange(60)
                splits = [Split.of(rows[20:], rows[:20], 60, "it"), Split.of(rows[:40], rows[40:], 60, "it")]
                write_splits(tmp_path / name, splits, pool.dataset.fingerprint)
            comm.barrier()
            folds = [pool.divided(comm, 0.0, 0, (str(tmp_path / name), number)) for number in range(2)]
            return [fold.train.scale.preparation for fold in folds]

        each = VirtualWorld(ranks=2).run(work)
        assert each[0] == each[1]
        return each[0]

    before, after = preparations(frame, "a.npz"), preparations(planted, "b.npz")
    assert before[0] != before[1]
    assert before[1] == after[1]  # fold 1 holds row 59 out
    assert before[0] != after[0]


@pytest.mark.parametrize("names", [("train.csv", "test.csv"), ("train-0.csv", "train-1.csv")])
def test_texts_of_several_files_have_one_dictionary(tmp_path: Path, names: tuple[str, str]) -> None:
    # The second file alone would have numbers, and no texts.
    for name, texts in zip(names, (["b", "x", "b"], ["7", "", "b"]), strict=True):
        (tmp_path / name).write_text("t,y\n" + "".join(f"{text},{n % 2}\n" for n, text in enumerate(texts)))
    contents = read_source(str(tmp_path), {})
    assert contents.table is not None
    assert contents.table.columns[0].texts == ("b", "x", "7")
    codes = np.concatenate([inputs[:][:, 0] for inputs, _ in contents.parts.values()])
    np.testing.assert_array_equal(codes, [0, 1, 0, 2, NAN, 0])


def test_tables_and_preparations_are_kept_as_json(tmp_path: Path) -> None:
    contents = read_source(made(), {"target": "y"})
    preparation = fitted(made(), embeds=True)
    assert parse_record(json.dumps(json.loads(to_json(preparation))), Preparation) == preparation
    np.savez(
        tmp_path / "a.npz", **{key: rows[:] if rows.ndim else rows for key, rows in to_keys(contents).items()}
    )
    with np.load(tmp_path / "a.npz") as file:
        assert from_keys(file, "a", "it").table == contents.table


def test_a_batch_of_any_size_has_the_same_bits(opened: Callable[..., DataSet]) -> None:
    data = opened(made(), options={"target": "y"}, validation=0)
    whole = data.train.take(torch.arange(200))[0]
    assert whole.shape == (200, *data.shape)
    assert data.shape == (data.table_inputs.width,)
    for size in (1, 7, 128):
        pieces = [data.train.take(some)[0] for some in torch.arange(200).split(size)]
        assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(data.on("cpu").train.take(torch.arange(200))[0], whole)
    elsewhere = data.on("meta").train.take(torch.arange(200))[0]
    assert (elsewhere.device.type, elsewhere.shape) == ("meta", whole.shape)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_and_times_of_day_are_seconds_in_any_unit(unit: str) -> None:
    at = pyarrow.array([3600, 9000], pyarrow.time32("s")).cast(pyarrow.time64("us"))
    trip = pyarrow.array([60, 120], pyarrow.duration("s")).cast(pyarrow.duration(unit))
    inputs, _ = read_source(pyarrow.table({"trip": trip, "at": at, "target": [0.5, 1.5]}), {}).parts["train"]
    assert cast("Any", inputs)[:].tolist() == [[60, 3600], [120, 9000]]


def test_values_of_another_kind_mean_the_same_or_are_refused() -> None:
    def read(values: list[object], kind: str) -> Any:
        table = pyarrow.table({"a": values, "target": [0.5, 1.5]})
        return cast("Any", read_source(table, {LIKE: (TableColumn("a", kind),)}).parts["train"][0])[:, 0]

    assert read([True, False], "number").tolist() == [1, 0]
    with pytest.raises(BadData, match="'a'"):
        read([20200105, 20200106], DATE)


def test_a_dictionary_may_hold_a_null() -> None:
    texts = pyarrow.DictionaryArray.from_arrays([0, 1, 2, 0], ["b", None, "a"])
    inputs, _ = read_source(pyarrow.table({"a": texts, "target": [0, 1, 0, 1]}), {}).parts["train"]
    np.testing.assert_array_equal(cast("Any", inputs)[:, 0], [1, NAN, 0, 1])
