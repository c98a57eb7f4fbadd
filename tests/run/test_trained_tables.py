"""A run on a table and other files: columns and texts are found by name, and amounts are in their units."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow
import pytest

import tutti
from tests.run.test_predict import predicted, trained
from tutti.cli.main import main
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadData
from tutti.records.ensemble import EnsembleMember, EnsembleRecord
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run import evaluate
from tutti.run import train as training
from tutti.run.config import TrainConfig
from tutti.run.resume import Resume
from tutti.run.train_job import EvaluateJob, TrainJob
from tutti.studies.ensemble.module import Ensemble

pytestmark = pytest.mark.usefixtures("nothing_beside")

COUNT = 200
OPTIONS: dict[str, Any] = {"data_options": {"target": "price"}, "precision": "fp64", "lr": 0.01, "epochs": 3}


def houses(seed: int = 0, cities: str = "Lima Oslo Paris Rome") -> pd.DataFrame:
    """A table with numbers, some of them missing, texts, zip codes of digits, days and flags."""
    random = np.random.default_rng(seed)
    city = random.choice(cities.split(), COUNT)
    area = random.normal(90, 30, COUNT).round(1)
    found = pd.DataFrame(
        {
            "area": np.where(random.random(COUNT) < 0.1, np.nan, area),
            "city": city,
            "zip": [f"{number:04}x" if number % 50 else "7" for number in random.integers(0, 60, COUNT)],
            "built": pd.Timestamp("1990-03-01") + pd.to_timedelta(random.integers(0, 9999, COUNT), unit="D"),
            "garden": random.random(COUNT) < 0.5,
            "price": (5e5 + 4e3 * area + 9e4 * (city == "Rome")).round() + 0.5,
        }
    )
    return found.assign(built=found.built.dt.date)


HOUSES = houses()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, in another place than where it was trained."""
    folder = tmp_path_factory.mktemp("houses")
    HOUSES.to_csv(folder / "a.csv", index=False)
    made = trained(folder / "made", data=f"{folder}/a.csv", predictions=True, **OPTIONS)
    return Path(shutil.move(made, folder / "moved"))


def test_a_table_in_another_order_has_the_same_predictions(run: Path, tmp_path: Path) -> None:
    model = tutti.load(run)
    wanted = model.predict(HOUSES)
    assert np.abs(wanted - HOUSES.price).mean() < HOUSES.price.std()
    # Fewer rows with other texts among them, in another order; columns likewise, and one more.
    some = HOUSES[(HOUSES.city != "Lima") & (HOUSES.zip > "001")].iloc[::-1]
    shown = some[["garden", "zip", "city", "built", "area"]].assign(more="?")
    for frame in (shown, pyarrow.Table.from_pandas(shown)):
        np.testing.assert_allclose(model.predict(frame), wanted[some.index], rtol=1e-13)
    shown.to_csv(tmp_path / "b.csv", index=False)
    shown.to_parquet(tmp_path / "b.parquet")
    for name in ("b.csv", "b.parquet"):
        out = predicted(run, f"{tmp_path}/{name}", tmp_path / "out.npy", ranks=2)
        np.testing.assert_array_equal(np.load(out)[:, 0], model.predict(shown))


def test_another_process_predicts_the_same_bits_as_the_run_did(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    assert main(["predict", str(run), "--part", "validation", "-o", str(out), "-n", "1"]) == 0
    with np.load(run / "predictions.npz") as found:
        np.testing.assert_array_equal(np.load(out), found["outputs"])
        assert np.abs(found["targets"].mean() - found["outputs"].mean()) < HOUSES.price.std()


def test_new_texts_are_one_and_gaps_are_filled_where_training_had_none(run: Path) -> None:
    model, one = tutti.load(run), HOUSES.iloc[[3]]
    new = model.predict(one.assign(city="Quito"))
    assert model.predict(one.assign(city="Berlin")) == new
    assert all(model.predict(one.assign(city=name)) != new for name in {*HOUSES.city})
    assert model.predict(one.assign(zip="new")) == model.predict(one.assign(zip="other"))
    for name in ("area", "city", "zip", "built", "garden"):
        assert np.isfinite(model.predict(one.assign(**{name: None})))


def test_what_a_table_lacks_is_named_with_the_nearest(run: Path, tmp_path: Path) -> None:
    lacking = HOUSES.rename(columns={"city": "citi"})
    lacking.to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(BadData, match=r"'city'.*mean 'citi'"):
        tutti.load(run).predict(lacking)
    with pytest.raises(BadData, match=r"'city'.*mean 'citi'"):
        predicted(run, f"{tmp_path}/c.csv", tmp_path / "out.csv")
    with pytest.raises(BadData, match="area, city, zip, built, garden of a table"):
        tutti.load(run).predict(np.zeros((2, 5)))


def test_other_data_are_evaluated_by_the_target_of_training(run: Path, tmp_path: Path) -> None:
    HOUSES[["price", *HOUSES.columns[:-1]]].iloc[::-1].to_csv(tmp_path / "d.csv", index=False)
    config = TrainConfig.read(run).changed(
        {"data": f"{tmp_path}/d.csv", "validation": 0.0, "predictions": False}
    )
    job = EvaluateJob(config, str(run), None, str(run), other_data=True)
    found = VirtualWorld(2).run(lambda comm: evaluate.work(comm, pickle.dumps(job)))[0]
    wanted = tutti.load(run).predict(HOUSES) - HOUSES.price
    assert found.loss == pytest.approx(np.square(wanted).mean(), rel=1e-9)
    assert found.metrics["mae"] == pytest.approx(np.abs(wanted).mean(), rel=1e-9)


def test_arrays_are_taken_where_all_columns_are_numbers(tmp_path: Path) -> None:
    frame = HOUSES[["area", "price"]].assign(more=np.arange(COUNT) % 7)
    frame.to_csv(tmp_path / "a.csv", index=False)
    made = trained(tmp_path / "run", data=f"{tmp_path}/a.csv", **OPTIONS)
    model = tutti.load(made)
    np.testing.assert_array_equal(model.predict(frame[["area", "more"]].to_numpy()), model.predict(frame))
    with pytest.raises(BadData, match="area, more of a table"):
        model.predict(np.zeros((2, 3)))


def test_an_ensemble_knows_the_texts_of_all_its_members(run: Path, tmp_path: Path) -> None:
    others = houses(1, "Rome Quito Oslo")
    others.to_csv(tmp_path / "a.csv", index=False)
    second = trained(tmp_path / "run", data=f"{tmp_path}/a.csv", **OPTIONS)
    runs = {"first": run, "second": second}
    members = tuple(
        EnsembleMember(name, TrainConfig.read(one).as_json(), RunFolder(one).read(TrainedOn))
        for name, one in runs.items()
    )
    ensemble = Ensemble(EnsembleRecord("regression", "mean", dict.fromkeys(runs, 0.5), members)).eval()
    alone = [tutti.load(one) for one in runs.values()]
    for member, model in zip(ensemble.members, alone, strict=True):
        member.load_state_dict(model.state_dict())
    both = pd.concat([HOUSES, others])
    wanted = np.mean([model.predict(both) for model in alone], axis=0)
    np.testing.assert_allclose(ensemble.predict(both), wanted, rtol=1e-13)


def test_a_run_that_begins_with_weights_prepares_as_theirs_did(run: Path, tmp_path: Path) -> None:
    houses(2, "Rome Quito Oslo").iloc[:, ::-1].to_csv(tmp_path / "a.csv", index=False)
    options = OPTIONS | {"data": f"{tmp_path}/a.csv", "weights": str(run), "lr": 1e-30}
    made = trained(tmp_path / "run", **options)
    before, after = (RunFolder(one).read(TrainedOn) for one in (run, made))
    assert before.preparation is not None
    assert before.preparation == after.preparation
    np.testing.assert_array_equal(tutti.load(made).predict(HOUSES), tutti.load(run).predict(HOUSES))


def test_a_run_resumed_in_another_precision_prepares_as_before(tmp_path: Path) -> None:
    HOUSES.to_csv(tmp_path / "a.csv", index=False)
    options = OPTIONS | {"data": f"{tmp_path}/a.csv", "precision": "fp32", "checkpoint": "1 epoch"}
    folder = RunFolder(trained(tmp_path / "run", **options))
    before = folder.read(TrainedOn)
    config = TrainConfig.read(folder.path).changed({"precision": "fp64", "epochs": 4})
    payload = pickle.dumps(TrainJob(config, quiet=True, resume=Resume(folder.path)))
    VirtualWorld(1).run(lambda comm: training.work(comm, payload))
    after = folder.read(TrainedOn)
    assert before.preparation is not None
    assert before.preparation == after.preparation


def test_programs_take_numbers_of_texts_and_give_amounts_in_their_units(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.onnx"
    assert main(["export", str(run), "--to", "onnx", "--out", str(out)]) == 0
    session = onnxruntime.InferenceSession(out)
    columns = json.loads(session.get_modelmeta().custom_metadata_map["columns"])
    rows = np.full((COUNT, len(columns)), np.nan)
    for at, column in enumerate(columns):
        values = HOUSES[column["name"]]
        if column["kind"] == "text":
            numbers = {text: number for number, text in enumerate(column["texts"])}
            values = values.map(lambda text, numbers=numbers: numbers.get(text, len(numbers)))
        elif column["kind"] == "date":
            values = (pd.to_datetime(values) - pd.Timestamp("1970-01-01")).dt.days
        rows[:, at] = values
    (found,) = session.run(None, {"inputs": rows})
    np.testing.assert_allclose(found[:, 0], tutti.load(run).predict(HOUSES), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "scaled"),
    [
        ({}, True),
        ({"loss": "l1"}, True),
        ({"loss": "torch.nn:PoissonNLLLoss"}, False),
        ({"prepare": "off"}, False),
    ],
)
def test_only_losses_of_distances_on_prepared_tables_are_scaled(
    tmp_path: Path, options: dict, scaled: bool
) -> None:
    HOUSES[["price", "garden"]].assign(price=HOUSES.price / 1e6).astype(float).to_csv(
        tmp_path / "a.csv", index=False
    )
    data = {"data_options": {"target": "price", **({"prepare": "off"} if "prepare" in options else {})}}
    given = {name: value for name, value in options.items() if name != "prepare"}
    made = trained(tmp_path / "run", **OPTIONS | {"data": f"{tmp_path}/a.csv"} | data | given)
    preparation = RunFolder(made).read(TrainedOn).preparation
    assert (preparation is not None and preparation.units is not None) is scaled


def test_a_target_that_never_varies_is_refused(tmp_path: Path) -> None:
    HOUSES.assign(price=3.5).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(BadData, match="nothing to learn"):
        trained(tmp_path / "run", data=f"{tmp_path}/a.csv", **OPTIONS)
