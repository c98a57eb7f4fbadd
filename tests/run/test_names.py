"""What is refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TABLES = """
import pyarrow as pa
from pathlib import Path
for name in ("t.csv", "train.csv"):
    Path(name).write_text("a,churn\\n1,0\\n2,1\\n")
with pa.output_stream("t.csv.gz") as file:
    file.write(b"a;churn\\n1;0\\n")
"""

PROGRAM = (
    TABLES
    + """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
for name in ("h5py", "PIL", "mlflow", "optuna", "onnx", "keras", "altair"):
    assert name not in sys.modules
    sys.modules[name] = None  # It cannot be imported, as if it were not installed.
from tutti.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main(words)
    found.append((code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""
)

ROWS = {
    "train mlpp": "'mlpp'; did you mean 'mlp'",
    "train mlp --model.hiden 3": "'hiden' of the model 'mlp'; did you mean 'hidden'",
    "train --strategy synk": "strategy 'synk'; did you mean 'sync'",
    "train --strategy.evry 2": "'evry' of the strategy 'sync'; did you mean 'every'",
    "train --optimizer adamm": "optimizer 'adamm'; did you mean 'adam'",
    "train --optimizer SGD --optimizer.momentm 1": "did you mean 'momentum'",
    "train --schedule cosin": "schedule 'cosin'; did you mean 'cosine'",
    "train --schedule one-cycle --schedule.pct_strt 1": "did you mean 'pct_start'",
    "train --loss mss": "loss 'mss'; did you mean 'mse'",
    "train --loss cross_entropy --loss.smoothin 1": "did you mean 'smoothing'",
    "train --metrics accuracy,f2": "metric 'f2'",
    "train --monitor val_acuracy": "--monitor; did you mean 'accuracy'",
    "train --augment flop": "augmentation 'flop'",
    "train no.keras": "there is no",
    "train --log mlflow": "pip install 'tutti[mlflow]'",
    "train --data digts": "did you mean 'digits'",
    "train --data t.cvs": "did you mean t.csv",
    **{
        f"train --data {file} --data.target chrun": "did you mean 'churn'"
        for file in ("t.csv", "t.csv.gz", ".")
    },
    "train --data t.csv --data.target churn --data.columns b": "no column 'b'",
    "train --data t.csv --data.tagret churn": "did you mean 'target'",
    "train --data t.csv --data.target chrun --dry-run": "did you mean 'churn'",
    "train --data t.csv --data.target churn --data.stream true": "for folders of NPY files",
    "train --data x.csv": "did you mean t.csv",
    "evaluate nowhere": "nowhere",
    "compare --strategies solo,synk": "did you mean 'sync'",
    "compare --data t.csv --data.target chrun": "did you mean 'churn'",
    "cv mlp,mlpp": "did you mean 'mlp'",
    "cv --optimizer sgd,adam": "candidates are given by --sweep optimizer=sgd,adam",
    "cv --data t.csv --data.target chrun": "did you mean 'churn'",
    "tune": "pip install 'tutti[tune]'",
    "export nowhere --to onnx": "pip install 'tutti[export]'",
    "export nowhere --to keras": "pip install 'tutti[keras]'",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    """Of each command the exit code, the message, and whether torch was imported."""
    words = json.dumps([row.split() for row in ROWS])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        cwd=tmp_path_factory.mktemp("names"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ROWS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", ROWS)
def test_wrong_input_is_refused_without_torch(
    refused: dict[str, tuple[int, str, bool]], command: str
) -> None:
    code, message, imported = refused[command]
    assert (code, imported) == (2, False)
    assert ROWS[command] in message
