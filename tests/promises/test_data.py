"""Data in many forms: the same samples give the same training, each of them once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.command import program, run, torch_program

pytestmark = pytest.mark.timeout(400)

TABLES = """
import csv, h5py, numpy as np, pandas, pyarrow, pyarrow.feather
from pathlib import Path

random = np.random.default_rng(0)
columns = {name: random.integers(-64, 64, 90) / 32 for name in "abc"}
target = np.arange(90) % 3
x = np.stack(list(columns.values()), 1).astype(np.float32)
frame = pandas.DataFrame({**columns, "target": target})
frame.to_csv("table.csv", index=False)
frame.to_csv("packed.csv.gz", index=False)
frame.to_json("table.jsonl", orient="records", lines=True)
frame.to_parquet("table.parquet")
pyarrow.feather.write_feather(frame, "table.arrow", compression="uncompressed")
np.savez("arrays.npz", x=x, y=target)
Path("files").mkdir()
np.save("files/x_train.npy", x)
np.save("files/y_train.npy", target)
for part in (slice(0, 40), slice(40, 90)):
    with h5py.File(f"part-{part.start}.h5", "w") as file:
        file["x"], file["y"] = x[part], target[part]
with h5py.File("whole.h5", "w") as file:
    file["x"], file["y"] = x, target
Path("list.txt").write_text("part-0.h5\\npart-40.h5\\n")
hdf5 = {"features": "x", "labels": "y"}
FORMS = {
    **{f"table.{end}": {"prepare": "off"} for end in ("csv", "jsonl", "parquet", "arrow")},
    "packed.csv.gz": {"prepare": "off"}, "arrays.npz": {}, "files": {}, "whole.h5": hdf5, "list.txt": hdf5,
}
FIXED = dict(steps=9, batch_size=20, lr=0.01, validation=0.2, precision="fp64", quiet=True)
"""

PICTURES = """
import io, struct, tarfile, numpy as np
from pathlib import Path
from PIL import Image

pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
classes = np.repeat(np.arange(3), 20)
np.savez("pictures.npz", x=pixels[:, None], y=classes)
Path("idx").mkdir()
for name, values in {"images-idx3": pixels, "labels-idx1": classes.astype(np.uint8)}.items():
    for part in ("train", "t10k"):
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        Path(f"idx/{part}-{name}-ubyte").write_bytes(header + values.tobytes())
tar = tarfile.open("samples.tar", "w")
for number, (picture, kind) in enumerate(zip(pixels, classes)):
    folder = Path("photos") / f"kind-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    Image.fromarray(picture).save(packed, "png")
    (folder / f"{number:03}.png").write_bytes(packed.getvalue())
    for end, content in {"png": packed.getvalue(), "cls": str(kind).encode()}.items():
        entry = tarfile.TarInfo(f"{number:03}.{end}")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
tar.close()
FORMS = {"pictures.npz": {}, "idx": {}, "photos": {}, "samples.tar": {}}
FIXED = dict(steps=6, batch_size=20, lr=0.01, validation=0.2, precision="fp64", quiet=True)
"""

TRAINED = """
def trained(data, options):
    model = tutti.train("mlp", data, data_options=options, workers=1, seed=3, **FIXED).model
    return torch.cat([one.detach().flatten() for one in model.parameters()])

found = {data: trained(data, options) for data, options in FORMS.items()}
first = next(iter(found.values()))
print(json.dumps({data: float((one - first).abs().max()) for data, one in found.items()}))
"""


# Promises 25 and 31
@pytest.mark.parametrize("made", [TABLES, PICTURES], ids=["tables", "pictures"])
def test_the_same_samples_in_any_format_give_the_same_network(tmp_path: Path, made: str) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("pyarrow")
    found = program(torch_program(made, TRAINED), tmp_path).figures
    assert len(found) in (4, 9)
    assert max(found.values()) < 1e-12


# Promise 31
def test_tutti_data_describes_and_converts(tmp_path: Path) -> None:
    rows = "".join(f"{n / 8},{n % 5},{'even' if n % 2 == 0 else 'odd'}\n" for n in range(40))
    (tmp_path / "table.csv").write_text("a,b,kind\n" + rows)
    before = run("tutti data table.csv --data.target kind", tmp_path).out
    assert "40" in before
    assert "even" in before
    run("tutti data convert table.csv shards --data.target kind", tmp_path)
    after = run("tutti data shards", tmp_path).out
    assert after.splitlines()[1:] == before.splitlines()[1:]


MISSING = """
from tutti.errors import BadData

def samples(missing):
    result = tutti.train("mlp", "holes.csv", data_options={"missing": missing}, workers=1, validation=0,
                         epochs=1, quiet=True)
    return result.summary.samples

try:
    samples("error")
except BadData as error:
    print(json.dumps([str(error), samples("drop"), samples("mean")]))
"""


# Promise 31
def test_missing_values_are_named_dropped_or_filled(tmp_path: Path) -> None:
    rows = [f"{n / 8},{n % 5},{n % 2}" for n in range(60)]
    rows[6] = ",1,0"
    (tmp_path / "holes.csv").write_text("width,height,target\n" + "\n".join(rows) + "\n")
    said, dropped, filled = program(torch_program(MISSING), tmp_path).figures
    assert "row 7, column 'width'" in said
    assert (dropped, filled) == (59, 60)


# Promise 31
def test_several_inputs_and_sequences_of_unequal_length_train_alike_on_any_ranks(tmp_path: Path) -> None:
    figures = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.pictures, self.ages = nn.Linear(16, 2), nn.Linear(1, 2)
    def forward(self, picture, age):
        return self.pictures(picture.flatten(1)) + self.ages(age.reshape(-1, 1))

torch.manual_seed(0)
y = torch.arange(30) % 2
pictures, ages = torch.randn(30, 4, 4), torch.randn(30)
sequences = [torch.randn(1 + n % 7, 3).numpy() for n in range(30)]
first = Both().double()

def apart(model, data):
    def trained(workers):
        result = tutti.train(copy.deepcopy(model), data, workers=workers, steps=8, batch_size=7, validation=0,
                             precision="fp64", optimizer="sgd", lr=0.1, seed=1, quiet=True)
        return torch.cat([one.detach().flatten() for one in result.model.parameters()])
    one = trained(1)
    return float((trained(2) - one).abs().max() / one.abs().max())

inputs = {"age": ages, "picture": pictures}
cases = {first: (inputs, y), "gru": (sequences, y)}
print(json.dumps([apart(model, data) for model, data in cases.items()]))
"""
    found = program(torch_program("import copy", figures), tmp_path).figures
    assert max(found) < 1e-12


STREAMED = """
import numpy as np
from pathlib import Path

# With this loss a sample's gradient is its inputs, whatever the weights: these end as the sum over all.
random = np.random.default_rng(0)
x = random.integers(-8, 8, (8192, 512)).astype(np.float32)
Path("shards").mkdir()
for number in range(4):
    rows = slice(2048 * number, 2048 * (number + 1))
    np.save(f"shards/x_train-{number:05}-of-00004.npy", x[rows])
    np.save(f"shards/y_train-{number:05}-of-00004.npy", np.zeros(2048, dtype=np.float32))

def minus_mean(outputs, targets):
    return -outputs.mean()

OPTIONS = {"stream": True, "buffer": 4}

def apart(workers, strategy):
    model = nn.Linear(512, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    result = tutti.train(model, "shards", data_options=OPTIONS, workers=workers, epochs=1,
                         strategy=strategy, batch_size=32, optimizer="sgd", lr=1.0, loss=minus_mean,
                         precision="fp64", validation=0, quiet=True)
    expected = torch.from_numpy(x.sum(0, dtype=np.float64)) / 32
    assert result.summary.samples == 8192, result.summary
    return float((result.model.weight[0].detach() - expected).abs().max() / expected.abs().max())

print(json.dumps([apart(2, "sync"), apart(2, "downpour")]))
"""


# Promise 25
def test_data_that_stay_in_their_files_are_trained_on_each_sample_once(tmp_path: Path) -> None:
    assert max(program(torch_program(STREAMED), tmp_path).figures) < 1e-12
