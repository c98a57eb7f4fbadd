"""What a trained run says of new samples: in a file by any number of ranks, and as a module."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import tutti
from tutti.cli.main import main
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import DataSet, Part
from tutti.errors import BadData, BadModel, BadOption, BadRunFolder
from tutti.records.output_kinds import Kind
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run import evaluate, predict
from tutti.run import train as training
from tutti.run.config import TrainConfig
from tutti.run.evaluate import seen_as
from tutti.run.train_job import EvaluateJob, PredictJob, TrainJob

pytestmark = pytest.mark.usefixtures("nothing_beside")

RANDOM = np.random.default_rng(0)
NAMES = ["ant", "bee", "cow"]
TABLE = RANDOM.normal(size=(900, 3))
KINDS = (TABLE @ [[2, 0, 1], [0, 2, -1], [1, 1, 0]]).argmax(1)
IMAGES = RANDOM.integers(0, 256, (60, 4, 5), dtype=np.uint8)


def table(path: Path, heads: str, columns: list[Any]) -> str:
    lines = zip(*columns, strict=True)
    path.write_text("\n".join([heads, *(",".join(map(str, line)) for line in lines)]) + "\n")
    return str(path)


def trained(folder: Path, **options: Any) -> Path:
    """The folder of a short run in this process."""
    fields = {"model": "mlp", "model_options": {"hidden": [8]}, "epochs": 1, "out": str(folder), **options}
    job = TrainJob(TrainConfig.from_json(fields), quiet=True)
    VirtualWorld(1).run(lambda comm: training.work(comm, pickle.dumps(job)))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on a table with named classes, on images, and on amounts."""
    folder = tmp_path_factory.mktemp("runs")
    data = table(folder / "a.csv", "x,y,z,kind", [*TABLE.T, [NAMES[k] for k in KINDS]])
    trained(folder / "table", data=data, data_options={"target": "kind"}, checkpoint="1 epoch", lr=0.01)
    np.savez(folder / "i.npz", x=IMAGES, y=np.arange(60) % 3)
    trained(folder / "images", data=str(folder / "i.npz"), precision="fp64")
    np.savez(folder / "v.npz", x=TABLE[:60].astype(np.float32), y=TABLE[:60, :2].astype(np.float32))
    trained(folder / "amounts", data=str(folder / "v.npz"))
    return folder


def predicted(run: Path, data: str, out: Path, ranks: int = 1, hosts: int | None = None, **job: Any) -> Path:
    config = TrainConfig.from_json({"data": data, "data_options": job.pop("options", {})})
    payload = pickle.dumps(PredictJob(config, str(run), str(out), other_data=True, **job))
    VirtualWorld(ranks, hosts).run(lambda comm: predict.work(comm, payload))
    return out


def test_any_number_of_ranks_writes_each_sample_once_in_order(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Columns in another order, one more, no target; and blocks that are smaller than the data.
    data = table(tmp_path / "new.csv", "id,z,x,y", [range(900), *TABLE[:, [2, 0, 1]].T])
    monkeypatch.setattr(predict, "AT_ONCE", 3)
    first = predicted(runs / "table", data, tmp_path / "1.csv").read_bytes()
    for ranks, hosts in ((2, None), (3, 2)):
        assert predicted(runs / "table", data, tmp_path / "2.csv", ranks, hosts).read_bytes() == first
    lines = list(csv.reader(first.decode().splitlines()))
    assert lines[0] == ["row", "class", "p(ant)", "p(bee)", "p(cow)"]
    model = tutti.load(runs / "table")
    chances = model.probabilities(TABLE)
    assert [int(line[0]) for line in lines[1:]] == list(range(900))
    assert [line[1] for line in lines[1:]] == model.predict(TABLE).tolist()
    assert [NAMES[k] for k in chances.argmax(1)] == model.predict(TABLE).tolist()
    # The file has float32 in text.
    assert np.allclose(np.array([line[2:] for line in lines[1:]], float), chances, rtol=2**-23, atol=0)
    assert (np.array(model.predict(TABLE)) == np.array(NAMES)[KINDS]).mean() > 0.6


def test_parts_of_streamed_data_are_predicted_with_their_numbers_in_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    np.save(folder / "x.npy", TABLE)
    np.save(folder / "y.npy", KINDS)
    given = {"data": str(folder), "data_options": {"stream": True, "buffer": 0.002}, "validation": 0.3}
    run = trained(tmp_path / "run", precision="fp64", **given)
    values = np.full((900, 3), np.nan)
    for part in ("train", "validation"):
        payload = pickle.dumps(
            PredictJob(
                replace(TrainConfig.read(run), predictions=True),
                str(run),
                str(tmp_path / f"{part}.parquet"),
                part=part,
            )
        )
        VirtualWorld(2).run(lambda comm, payload=payload: predict.work(comm, payload))
        found = parquet.read_table(tmp_path / f"{part}.parquet").to_pydict()
        rows = np.array(found.pop("row"))
        assert np.isnan(values[rows]).all()
        values[rows] = np.stack([found[f"p({kind})"] for kind in range(3)], 1)
    assert np.allclose(values, tutti.load(run).probabilities(TABLE), rtol=0, atol=1e-12)


def test_every_kind_of_file_has_the_same_predictions(runs: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    files = [predicted(runs / "images", str(tmp_path / "x.npy"), tmp_path / f"a.{end}", 2)
             for end in ("npy", "csv", "parquet")]  # fmt: skip
    values = np.load(files[0])
    assert values.dtype == np.float64
    assert values.shape == (60, 3)
    assert np.array_equal(values, tutti.load(runs / "images").probabilities(IMAGES))
    lines = np.loadtxt(files[1], delimiter=",", skiprows=1)
    found = parquet.read_table(files[2])
    assert np.array_equal(lines[:, 2:], values)
    assert np.array_equal(np.stack([found[f"p({k})"].to_numpy() for k in range(3)], 1), values)
    assert lines[:, 1].tolist() == found["class"].to_pylist() == values.argmax(1).tolist()
    amounts = predicted(runs / "amounts", str(runs / "v.npz"), tmp_path / "v.csv", 2)
    given = TABLE[:60].astype(np.float32)
    assert amounts.read_text().splitlines()[0] == '"row","value 0","value 1"'
    named = predict.Meaning(Kind.REGRESSION, None, ("low", "high")).columns(np.arange(2), np.eye(2))
    assert [*named] == ["row", "low", "high"]
    values = np.loadtxt(amounts, delimiter=",", skiprows=1)[:, 1:]
    assert np.array_equal(values.astype(np.float32), tutti.load(runs / "amounts").predict(given))


def test_parts_of_the_data_of_the_run_have_the_numbers_of_their_samples(runs: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "v.csv")
    assert main(["predict", str(runs / "table"), "--part", "validation", "-o", out, "-n", "1"]) == 0
    lines = list(csv.reader(Path(out).read_text().splitlines()))[1:]
    rows = [int(line[0]) for line in lines]
    assert len(rows) == 90
    assert [line[1] for line in lines] == tutti.load(runs / "table").predict(TABLE[rows]).tolist()
    right = np.mean([NAMES[KINDS[row]] == line[1] for row, line in zip(rows, lines, strict=True)])
    summary = RunFolder(runs / "table").read(tutti.Summary)
    assert summary.validation is not None
    assert summary.validation.metrics["accuracy"] == right


def test_rows_that_a_training_leaves_out_are_counted(tmp_path: Path) -> None:
    names, x = np.array(NAMES, object)[KINDS], TABLE.astype(object)
    names[::7], x[3::11, 0] = "", ""
    for number, some in enumerate((slice(500), slice(500, None))):
        table(tmp_path / f"d-{number}.csv", "x,y,z,kind", [*x[some].T, names[some]])
    data = {"data": str(tmp_path / "d-*.csv"), "data_options": {"target": "kind", "missing": "drop"}}
    run, rows = trained(tmp_path / "run", test=0.3, lr=0.01, **data), set[int]()
    for part in ("train", "validation", "test"):
        out = tmp_path / f"{part}.csv"
        assert main(["predict", str(run), "--part", part, "-o", str(out), "-n", "1"]) == 0
        found = {int(line["row"]): line["class"] for line in csv.DictReader(out.read_text().splitlines())}
        assert [*found.values()] == tutti.load(run).predict(TABLE[[*found]]).tolist()
        rows |= found.keys()
    assert rows == {row for row in range(900) if row % 7 and row % 11 != 3}


def test_other_data_are_evaluated_by_names_of_classes_and_columns(runs: Path, tmp_path: Path) -> None:
    some = np.flatnonzero(KINDS > 0)  # no ants, so that bees are class 0 there
    columns = [[NAMES[k] for k in KINDS[some]], *TABLE[some][:, [1, 2, 0]].T]
    data = table(tmp_path / "b.csv", "kind,y,z,x", columns)
    config = TrainConfig.from_json({"data": data, "data_options": {"target": "kind"}, "validation": 0.0})
    run = str(runs / "table")
    job = EvaluateJob(
        config.changed({"model": "mlp", "model_options": {"hidden": [8]}}), run, None, run, True
    )
    found = VirtualWorld(2).run(lambda comm: evaluate.work(comm, pickle.dumps(job)))[0]
    right = tutti.load(run).predict(TABLE[some]) == np.array(NAMES)[KINDS[some]]
    assert found.samples == len(some)
    assert found.metrics["accuracy"] == right.mean()


@pytest.mark.parametrize(
    ("labels", "others", "kind"),
    [
        (2 * KINDS + 3, 2.0 * KINDS + 3, np.int64),
        (KINDS > 0, (KINDS > 0) * 1, np.bool_),
        (np.where(KINDS, "yes", "no"), np.where(KINDS, " yes", "no"), np.str_),
        (np.eye(3)[KINDS], KINDS, np.int64),
    ],
)
def test_labels_keep_their_type_and_match_other_spellings(
    tmp_path: Path, labels: Any, others: Any, kind: type
) -> None:
    np.savez(tmp_path / "a.npz", x=TABLE, y=labels)
    run = trained(tmp_path / "run", data=str(tmp_path / "a.npz"), lr=0.01)
    model = tutti.load(run)
    found = model.predict(TABLE.astype(np.float32))
    plain = labels.argmax(1) if labels.ndim > 1 else labels
    assert found.dtype.type is kind
    assert {*found.tolist()} <= {*plain.tolist()}
    out = parquet.read_table(predicted(run, str(tmp_path / "a.npz"), tmp_path / "out.parquet"))
    assert out["class"].to_pylist() == found.tolist()
    assert out.column_names == [
        "row",
        "class",
        *(f"p({one})" for one in model.labels or range(model.data.outputs)),
    ]
    data = table(tmp_path / "b.csv", "x,y,z,kind", [*TABLE.T, others])
    config = TrainConfig.read(run).changed(
        {"data": data, "data_options": {"target": "kind"}, "validation": 0.0}
    )
    job = EvaluateJob(config, str(run), None, str(run), True)
    result = VirtualWorld(1).run(lambda comm: evaluate.work(comm, pickle.dumps(job)))[0]
    assert result.metrics["accuracy"] == (found == plain).mean()


def test_a_run_that_is_not_finished_gives_its_newest_checkpoint_and_says_so(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tutti.load(runs / "table").outputs(TABLE[:9])
    run = shutil.copytree(runs / "table", tmp_path / "run")
    (run / "weights.safetensors").unlink()
    assert np.array_equal(tutti.load(run).outputs(TABLE[:9]), whole)
    assert "no final weights; those of step" in capsys.readouterr().err
    assert np.array_equal(tutti.load(next((run / "checkpoints").glob("step-*"))).outputs(TABLE[:9]), whole)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(BadRunFolder, match="no weights yet"):
        tutti.load(run)


def test_a_module_of_a_script_is_given_again_and_a_missing_file_is_named(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(runs / "amounts", tmp_path / "run")
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"model": "mlp"', '"model": "object:Net"'))
    own = tutti.load(runs / "amounts")
    with pytest.raises(BadOption, match=r"tutti.load\(run, model=...\)"):
        tutti.load(run, trust=True)
    with pytest.raises(BadModel, match="another model"):
        tutti.load(run, model=torch.nn.Linear(3, 2))
    (run / "config.json").write_text(text.replace('"model": "mlp"', '"model": "gone.py:net"'))
    with pytest.raises(BadOption, match=r"there is no .*gone.py; check the path"):
        tutti.load(run, trust=True)
    assert own.labels == ()
    assert not own.training


def test_unfit_data_are_refused_and_no_file_is_left(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "wide.npy", IMAGES[:, :2])
    np.save(tmp_path / "float.npy", IMAGES / 255)
    table(tmp_path / "text.csv", "x,y,z", [["1"], ["2"], ["three"]])
    table(tmp_path / "few.csv", "x,y", [["1"], ["2"]])
    (tmp_path / "there.csv").touch()
    for run, data, said in (
        ("images", "wide.npy", r"shape \(1, 2, 5\), but the model was trained"),
        ("images", "float.npy", "float64, but the model was trained on uint8, from 0 to 255"),
        ("images", "gone.npy", "there is no"),
        ("table", "text.csv", "column 'z' .*'three'"),
        ("table", "few.csv", "no column 'z'"),
    ):
        with pytest.raises(BadData, match=said):
            predicted(runs / run, str(tmp_path / data), tmp_path / "out.csv", 2)
    with pytest.raises(BadOption, match="each is to be predicted"):
        predicted(runs / "amounts", f"{tmp_path}/few.csv", tmp_path / "out.csv", options={"missing": "drop"})
    out = str(tmp_path / "out.csv")
    for words, said in (
        (["images", "-o", f"{tmp_path}/a.txt"], "a.txt; give one that ends in .csv, .parquet, .npy"),
        (["images", "-o", f"{tmp_path}/there.csv"], "give --overwrite"),
        (["images"], "give one with -o"),
        (["images", "-o", out, "-n", "1"], "has no test part; it has: train, validation"),
        ([".", "-o", out], "so it is no folder of a run"),
    ):
        assert main(["predict", f"{runs}/{words[0]}", *words[1:]]) == 2, words
        assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {
        *("wide.npy", "float.npy", "text.csv", "few.csv", "there.csv")
    }
    with pytest.raises(BadData, match="float64, but the model was trained on uint8, from 0 to 255"):
        tutti.load(runs / "images").predict(IMAGES / 255)


def test_columns_of_a_frame_are_found_by_their_names(runs: Path) -> None:
    model = tutti.load(runs / "table")
    frame = pyarrow.table({"z": TABLE[:, 2], "text": ["a"] * 900, "x": TABLE[:, 0], "y": TABLE[:, 1]})
    assert np.array_equal(model.outputs(frame), model.outputs(TABLE))


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.words = nn.Embedding(9, outputs)
        self.image, self.age = nn.Linear(4, outputs), nn.Linear(1, outputs)

    def forward(self, image, words, age, lengths):
        there = torch.arange(words.shape[1]) < lengths[:, None]
        return self.image(image) + self.age(age) + (self.words(words) * there[:, :, None]).sum(1)
"""


def test_several_inputs_by_name_and_sequences_are_predicted_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(NET)
    count = 600
    words = [RANDOM.integers(0, 9, number % 5).tolist() for number in range(count)]
    inputs = {
        "age": RANDOM.normal(size=count).round(3),
        "words": words,
        "image": RANDOM.normal(size=(count, 4)).round(3),
    }
    lines = [
        {"other": [1], "age": age, "words": some, "image": image.tolist(), "y": number % 3}
        for number, (age, some, image) in enumerate(zip(*inputs.values(), strict=True))
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"columns": ["image", "words", "age"]}
    run = trained(
        tmp_path / "run",
        model=f"{tmp_path}/net.py:Net",
        model_options={},
        data=f"{tmp_path}/a.jsonl",
        data_options=options,
        epochs=2,
        checkpoint="1 epoch",
    )
    # All keys are there, in another order; no target; and blocks that are smaller than the data.
    (tmp_path / "new.jsonl").write_text("\n".join(json.dumps(line | {"y": None}) for line in lines))
    monkeypatch.setattr(predict, "AT_ONCE", 1)
    given = {name: np.asarray(one, "f4") if name != "words" else one for name, one in inputs.items()}
    wanted = tutti.load(run, trust=True).probabilities(
        {name: given[name] for name in ("image", "words", "age")}
    )
    for ranks, hosts in ((1, None), (3, 2)):
        out = predicted(run, f"{tmp_path}/new.jsonl", tmp_path / "out.npy", ranks, hosts, trust=True)
        assert np.allclose(np.load(out), wanted, rtol=0, atol=1e-6)
    job = EvaluateJob(
        TrainConfig.read(run, True).changed({"validation": 0.0, "data_options": {}}),
        str(run),
        None,
        str(run),
        True,
    )
    found = VirtualWorld(2).run(lambda comm: evaluate.work(comm, pickle.dumps(job)))[0]
    assert found.metrics["accuracy"] == (wanted.argmax(1) == np.arange(count) % 3).mean()


TRAINED = TrainedOn("pets", 3, ("cat", "cow", "dog"), (2,), (), (), 3, fill=(5.0, 6.0))


def data_of(labels, numbers):
    inputs = torch.tensor([[float("nan"), 1.0]] * len(numbers))
    return DataSet("others", Part(inputs, torch.tensor(numbers)), None, None, len(labels), labels)


def test_missing_values_become_the_means_of_training():
    seen = seen_as(data_of(("cat", "cow"), [0, 1]), TRAINED)
    assert seen.train.take(torch.tensor([1]))[0].tolist() == [[5, 1]]
