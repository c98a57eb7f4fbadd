"""What comes of a run: predictions, programs for others, estimators, traces; and models from others."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.promises.command import history, program, run, summary, torch_program

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a network of the digits."""
    folder = tmp_path_factory.mktemp("trained")
    run("tutti train mlp -n 2 --epochs 2 --trace --out run", folder)
    return folder / "run"


# Promise 32
def test_predictions_and_evaluations_agree_with_the_run_on_any_ranks(trained: Path, tmp_path: Path) -> None:
    for ranks in (1, 3):
        run(f"tutti predict {trained} -n {ranks} -o {ranks}.csv", tmp_path)
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "3.csv").read_bytes()
    with (tmp_path / "1.csv").open() as file:
        rows = list(csv.DictReader(file))
    test = summary(trained)["test"]
    counted = [sum(row["class"] == str(kind) for row in rows) for kind in range(10)]
    assert counted == [sum(column) for column in zip(*test["confusion"], strict=True)]
    assert sum(float(rows[0][f"p({kind})"]) for kind in range(10)) == pytest.approx(1)
    said = run(f"tutti evaluate {trained} -n 3", tmp_path).out
    assert "359" in said
    assert f"{100 * test['metrics']['accuracy']:.2f}%" in said


# Promises 26 and 32
def test_exported_programs_give_the_outputs_of_the_run(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    figures = f"""
import numpy as np, onnxruntime
from sklearn.datasets import load_digits
from safetensors.torch import load_file

pixels = load_digits().images.astype(np.uint8).reshape(-1, 1, 8, 8)[:20]
model = tutti.load({str(trained)!r})
expected = model(torch.from_numpy(pixels)).detach()
session = onnxruntime.InferenceSession("model.onnx")
(name,) = [one.name for one in session.get_inputs()]
found = {{"onnx": torch.from_numpy(session.run(None, {{name: pixels}})[0]),
          "pt2": torch.export.load("model.pt2").module()(torch.from_numpy(pixels)).detach()}}
weights = torch.load("model.pt", weights_only=True)
same = all(torch.equal(weights[name], value) for name, value in load_file("model.safetensors").items())
apart = [float((one - expected).abs().max()) for one in found.values()]
samples = ({{0: torch.export.Dim("samples")}},)
network = torch.export.export(model.model, (torch.from_numpy(pixels).float() / 255,), dynamic_shapes=samples)
torch.export.save(network, "network.pt2")
print(json.dumps([same, float(expected.abs().max()), *apart]))
"""
    forms = {"onnx": "onnx", "torch-export": "pt2", "torch": "pt", "safetensors": "safetensors"}
    for form, ending in forms.items():
        run(f"tutti export {trained} --to {form} --out model.{ending}", tmp_path)
    same, largest, *errors = program(torch_program(figures), tmp_path).figures
    assert same
    assert max(errors) < 1e-4 < 1 < largest
    for model in ("mlp --weights model.pt", "network.pt2"):
        run(f"tutti train {model} --steps 41 -n 2 --out goes-on-{model[:3]}", tmp_path)
    first, *others = (history(one)[0]["train"]["loss"] for one in (trained, *tmp_path.glob("goes-on-*")))
    assert len(others) == 2
    assert max(others) < first / 2  # both go on from the trained weights


# Promise 26
def test_models_of_keras_train_and_come_back(tmp_path: Path) -> None:
    if find_spec("keras") is None:
        pytest.skip("keras is not installed")
    figures = """
import keras
from keras.layers import Dense, Flatten
model = keras.Sequential([keras.Input((8, 8, 1)), Flatten(), Dense(32, "relu"), Dense(10)])
model.save("net.keras")
result = tutti.train(model, "digits", workers=2, epochs=3, lr=0.003, quiet=True)
model.save("trained.keras")
print(json.dumps(result.summary.test.metrics["accuracy"]))
"""
    program(torch_program("import os; os.environ['KERAS_BACKEND'] = 'torch'", figures), tmp_path)
    for name in ("net", "trained"):
        run(f"tutti train {name}.keras -n 2 --epochs 1 --out run-{name}", tmp_path)
    first, then = (history(tmp_path / f"run-{name}")[0]["train"]["loss"] for name in ("net", "trained"))
    assert then < first / 2
    run("tutti export run-trained --to keras --out again.keras --trust", tmp_path)
    assert (tmp_path / "again.keras").stat().st_size > 0


# Promise 26
def test_models_of_hugging_face_train(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    figures = """
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
ids = torch.randint(2, 50, (64, 6))
classes = (ids[:, 0] > 25).long()
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=32, num_labels=2)
data = ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, classes)
model = BertForSequenceClassification(config)
history = tutti.train(model, data, workers=2, epochs=8, lr=0.01, validation=0, quiet=True).history
print(json.dumps([record.train.loss for record in history]))
"""
    losses = program(torch_program(figures), tmp_path).figures
    assert losses[-1] < losses[0] / 2


# Promise 32
def test_estimators_fit_into_scikit_learn(tmp_path: Path) -> None:
    figures = """
import pickle
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tutti.sklearn import Classifier, Regressor

X, y = load_digits(return_X_y=True)
network = make_pipeline(StandardScaler(), Classifier("mlp", lr=0.003, epochs=3, random_state=0))
scores = cross_val_score(network, X, y, cv=2).tolist()
fitted = network.fit(X, y)
again = pickle.loads(pickle.dumps(fitted))
rows, sums = X[:, :8] / 16, X[:, :8].sum(1)
amounts = Regressor("mlp", lr=0.01, epochs=20, random_state=0).fit(rows, sums)
same = bool((again.predict(X) == fitted.predict(X)).all())
print(json.dumps([scores, same, amounts.score(rows, sums)]))
"""
    scores, same, r2 = program(torch_program(figures), tmp_path).figures
    assert min(scores) > 0.85
    assert same
    assert r2 > 0.9


# Promise 24
def test_one_trace_has_every_rank_on_one_clock(trained: Path) -> None:
    events = json.loads((trained / "trace.json").read_text())["traceEvents"]
    spans = [one for one in events if one.get("ph") == "X"]
    ranks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in spans:
        if one["name"] == "exchange":
            ranks.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    assert len(ranks) == 2
    first, second = (sorted(one) for one in ranks.values())
    assert len(first) == len(second) == 82
    # No rank leaves an exchange before the other one has come to it, as their clocks see it.
    for (begin, end), (other_begin, other_end) in zip(first, second, strict=True):
        assert begin < other_end
        assert other_begin < end
    assert {"data", "forward", "backward"} <= {one["name"] for one in spans}
