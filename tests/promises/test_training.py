"""One network, trained in parallel in many ways: the result is right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.promises.command import history, program, run, summary, torch_program, weights_sha256

pytestmark = pytest.mark.timeout(400)

NET = """
torch.manual_seed(0)
INPUTS = torch.randn(61, 6).double()
TARGETS = (INPUTS.sum(1) > 0).long()
FIXED = dict(optimizer="adam", lr=0.01, validation=0, precision="fp64", quiet=True)

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()

def flat(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])

def plain(steps):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(INPUTS), TARGETS).backward()
        optimizer.step()
    return flat(model)

def trained(batch_size=61, steps=10, **options):
    data = (INPUTS, TARGETS)
    return flat(tutti.train(net(), data, batch_size=batch_size, steps=steps, **FIXED, **options).model)

def apart(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())
"""


# Promise 1
def test_one_command_trains_alone_or_in_parallel_and_times_each_stage(tmp_path: Path) -> None:
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run(f"real tutti train mlp -n {ranks} --epochs 2 --out {folder}", tmp_path)
        found = summary(folder)
        assert (found["world"]["ranks"], found["steps"], found["test"]["samples"]) == (ranks, 82, 359)
        for epoch in history(folder):
            assert len(epoch["ranks"]) == ranks
            for rank in epoch["ranks"]:
                stages = rank["stages"]
                assert min(stages["forward"], stages["backward"], stages["update"], stages["validation"]) > 0
                assert sum(stages.values()) < 2 * epoch["seconds"]["total"] + 1


# Promises 1 and 10
def test_a_comparison_has_every_way_in_one_table_and_one_page_with_figures(tmp_path: Path) -> None:
    options = "--strategies solo,sync -n 1,2 --repeats 1 --epochs 1 --out compared"
    said = run(f"tutti compare mlp {options}", tmp_path).out
    runs = sorted((tmp_path / "compared").glob("*/*/summary.json"))
    assert len(runs) == 4
    rounded = {f"{100 * summary(one.parent)['test']['metrics']['accuracy']:.2f}" for one in runs}
    assert len(rounded) == 1  # sync makes the updates of one process
    assert said.count(rounded.pop()) == 4
    figures = {one.stem for one in (tmp_path / "compared" / "figures").glob("*.svg")}
    assert {"confusion", "classes", "cores", "progress", "speed-up", "stages"} <= figures
    assert "<svg" in (tmp_path / "compared" / "report.html").read_text()


# Promise 2
def test_ranks_follow_plain_torch_though_the_samples_do_not_divide(tmp_path: Path) -> None:
    figures = """
one, small = plain(10), trained(batch_size=7, workers=1)
print(json.dumps({
    "whole": [apart(trained(workers=n), one) for n in (1, 2, 3)],
    "batches": [apart(trained(batch_size=7, workers=n), small) for n in (2, 3)],
    "moved": apart(net_0 := flat(net()), one),
}))
"""
    found = program(torch_program(NET, figures), tmp_path).figures
    assert max(found["whole"] + found["batches"]) < 1e-12
    assert found["moved"] > 1e-3


# Promise 2
def test_verify_tells_models_that_follow_sequential_training_from_those_that_do_not(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))\n"
    )
    run("tutti verify mlp -n 2 --dtype float64", tmp_path)
    run("tutti verify net.py:make -n 2 --dtype float64", tmp_path)
    said = run("tutti verify net.py:make -n 2 --dtype float64 --batch-norm local", tmp_path, code=1)
    assert "BatchNorm" in said.out + said.err


# Promise 3
@pytest.mark.mnist
def test_the_sigmoid_network_on_fashion_mnist_has_three_parts(tmp_path: Path, real_data: Path) -> None:
    options = "--model.activation sigmoid --model.hidden 100 --validation 0.1 --steps 200 --out run"
    run(f"tutti train mlp --data fashion-mnist {options} -n 2", tmp_path, TUTTI_DATA=str(real_data))
    found = summary(tmp_path / "run")
    assert found["parameters"] == 784 * 100 + 100 + 100 * 10 + 10
    assert (found["validation"]["samples"], found["test"]["samples"]) == (6_000, 10_000)
    assert found["test"]["metrics"]["accuracy"] > 0.6


# Promise 5
def test_a_model_held_by_two_ranks_trains_as_the_undivided_one(tmp_path: Path) -> None:
    figures = """
layouts = ("tensor", "pipeline", "sharded")
print(json.dumps([apart(trained(workers=2, parallel=layout), plain(10)) for layout in layouts]))
"""
    found = program(torch_program(NET, figures), tmp_path).figures
    assert max(found) < 1e-12


# Promise 5
def test_a_rank_needs_less_memory_for_a_part_of_a_model(tmp_path: Path) -> None:
    said = run("tutti layouts mlp -n 2 --model.hidden 1024,1024,1024", tmp_path).out
    shares = {name: int(share) for name, share in re.findall(r"(\w+)=2 .* (\d+)%", said)}
    assert {"tensor", "pipeline", "sharded"} <= shares.keys()
    assert shares["tensor"] < 60
    assert max(shares.values()) < 90


LEDGER = """
# Sample i is the i-th unit vector, and its gradient moves the i-th weight alone, whatever the weights are:
# so the weights are a ledger of whose gradients have arrived.
SAMPLES, BATCH, WORKERS = 24, 4, 2

class Ledger(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse
        self.rows = nn.Embedding(SAMPLES, 1, sparse=True) if sparse else nn.Linear(SAMPLES, 1, bias=False)
        nn.init.zeros_(self.rows.weight)
        self.double()

    def forward(self, inputs):
        return self.rows(inputs).flatten()

def minus_mean(outputs, targets):
    return -outputs.mean()

ZEROS = torch.zeros(SAMPLES, dtype=torch.float64)

def entries(strategy, sparse=False, **options):
    inputs = torch.arange(SAMPLES) if sparse else torch.eye(SAMPLES, dtype=torch.float64)
    data = {"x_train": inputs, "y_train": ZEROS, "x_test": inputs[:7], "y_test": ZEROS[:7]}
    result = tutti.train(
        Ledger(sparse), data, strategy=strategy, workers=WORKERS, loss=minus_mean, optimizer="sgd", lr=1.0,
        precision="fp64", validation=0, batch_size=BATCH, epochs=1, quiet=True, **options
    )
    test = result.summary.test
    weights = result.model.rows.weight.detach().flatten().tolist()
    return {"weights": weights, "samples": test.samples, "loss": test.loss}
"""

SUM, MEAN, SOME = 1 / 4, 1 / 8, None
"""How far one sample moves its weight: by its share of a batch, or of the mean of two workers' batches."""

ARRIVED = {
    "tutti.Sync()": SUM,
    "tutti.Sync(collective='ring')": SUM,
    "tutti.ParamServer()": SUM,
    "tutti.ParamServer(quorum=0.5)": SOME,
    "tutti.Local(every=2)": MEAN,
    "tutti.DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)": MEAN,
    "tutti.SparseLoCo(every=2, keep=1.0, quantize=False)": MEAN,
    "tutti.AsyncDiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)": MEAN,
    "tutti.NoLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)": MEAN,
    "tutti.Gossip()": MEAN,
    "tutti.ADPSGD()": MEAN,
    "tutti.Downpour()": SUM,
    "tutti.Downpour(), balance='queue'": SUM,
    "tutti.Downpour(push_every=3, side='worker')": SUM,
    "tutti.Lazy(slack=1)": SUM,
    "tutti.EASGD(every=1)": SOME,
    "tutti.EASGDSync(every=1)": SOME,
    "tutti.GEM()": SOME,
    "tutti.Hogwild(), sparse=True": SUM,
}


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights and the test figures by every strategy, of one program."""
    trainings = [f"found[{strategy!r}] = entries({strategy})" for strategy in ARRIVED]
    lines = ["found = {}", *trainings, "print(json.dumps(found))"]
    return program(torch_program(LEDGER, *lines), tmp_path_factory.mktemp("ledgers")).figures


# Promises 6, 12, 13, 14 and 25
@pytest.mark.parametrize("strategy", ARRIVED)
def test_each_samples_gradient_arrives_once_by_every_strategy(strategy: str, ledgers: Any) -> None:
    found, expected = ledgers[strategy]["weights"], ARRIVED[strategy]
    if expected is SOME:
        assert all(-1e-12 < weight <= 2 * SUM + 1e-12 for weight in found)
        assert sum(weight > 0 for weight in found) >= (12 if "quorum" in strategy else 24)
    else:
        assert found == pytest.approx([expected] * 24, rel=1e-12)


# Promise 22
@pytest.mark.parametrize("strategy", ARRIVED)
def test_evaluation_counts_each_sample_once_under_every_strategy(strategy: str, ledgers: Any) -> None:
    found = ledgers[strategy]
    assert found["samples"] == 7
    assert found["loss"] == pytest.approx(-sum(found["weights"][:7]) / 7, rel=1e-12)


# Promise 6
def test_hogwild_learns_without_locks(tmp_path: Path) -> None:
    run("tutti train mlp --strategy hogwild -n 2 --epochs 5 --out run", tmp_path)
    found = summary(tmp_path / "run")
    assert found["test"]["metrics"]["accuracy"] > 0.8
    assert [len(epoch["ranks"]) for epoch in history(tmp_path / "run")] == [2] * 5
    assert all(rank["samples"] > 0 for rank in history(tmp_path / "run")[-1]["ranks"])


# Promise 12
def test_every_all_reduce_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    figures = """
ways = ("native", "ring", "tree", "torus", "hierarchical", "halving_doubling")
strategies = [tutti.Sync(collective=way) for way in ways]
print(json.dumps([apart(trained(workers=4, strategy=one), plain(10)) for one in strategies]))
"""
    found = program(torch_program(NET, figures), tmp_path).figures
    assert max(found) < 1e-12


# Promise 12
def test_compressed_gradients_are_fewer_bytes_and_still_train(tmp_path: Path) -> None:
    figures = """
def sent(**options):
    strategy = tutti.Sync(**options)
    result = tutti.train("mlp", "digits", strategy=strategy, workers=2, epochs=4, lr=0.003, quiet=True)
    return [result.history[-1].ranks[0].bytes_sent, result.summary.test.metrics["accuracy"]]

ways = ("bf16", "int8", "top_k", "power_sgd")
found = {way: sent(compress=way, compress_inside=True) for way in ways}
found |= {"none": sent(), "adasum": sent(reduce="adasum")}
print(json.dumps(found))
"""
    found = program(torch_program(figures), tmp_path).figures
    assert min(accuracy for _, accuracy in found.values()) > 0.7
    shares = {way: sent / found["none"][0] for way, (sent, _) in found.items()}
    assert shares["bf16"] < 0.6
    assert shares["int8"] < 0.4
    assert max(shares["top_k"], shares["power_sgd"]) < 0.3


# Promise 8
def test_schedules_are_those_of_torch(tmp_path: Path) -> None:
    figures = """
def compared(name, ours, **options):
    history = tutti.train("mlp", "digits", optimizer="sgd", lr=0.1, schedule=ours, schedule_options=options,
                          epochs=4, workers=1, quiet=True).history
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    torchs, used = getattr(torch.optim.lr_scheduler, name)(optimizer, **options), []
    for record in history:
        for step in range(1 if ours == "plateau" else 41):
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            torchs.step(*([record.validation.loss] if ours == "plateau" else []))
        used.append(rate)
    return [[record.lr for record in history], used]

print(json.dumps([
    compared("CosineAnnealingWarmRestarts", "CosineAnnealingWarmRestarts", T_0=60, T_mult=2),
    compared("OneCycleLR", "OneCycleLR", max_lr=0.5, total_steps=165),
    compared("ReduceLROnPlateau", "plateau", patience=0, threshold=0.5),
]))
"""
    for ours, torchs in program(torch_program(figures), tmp_path).figures:
        assert ours == pytest.approx(torchs, rel=1e-12)
        assert len(set(ours)) > 1


MODELS = {
    "mlp": (1, 8, 8),
    "cnn": (1, 28, 28),
    "lenet": (1, 28, 28),
    "alexnet": (3, 32, 32),
    "vgg11": (3, 32, 32),
    "googlenet": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "mobilenet": (3, 32, 32),
    "gru": (5, 4),
    "transformer": (5, 4),
    "jets": (5, 4),
    "tabular": (8,),
}


# Promise 11
def test_the_models_train_by_their_names(tmp_path: Path) -> None:
    figures = f"""
found = {{}}
for name, shape in {MODELS}.items():
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, *shape), torch.tensor([0, 1, 2, 3])
    data = (inputs, targets)
    result = tutti.train(name, data, steps=1, batch_size=4, workers=1, validation=0, seed=1, quiet=True)
    found[name] = [result.summary.steps, result.history[-1].train.loss, result.summary.parameters]
print(json.dumps(found))
"""
    found = program(torch_program(figures), tmp_path).figures
    assert found.keys() == MODELS.keys()
    assert all(steps == 1 and 0 < loss < 20 for steps, loss, _ in found.values())
    assert found["resnet18"][2] == pytest.approx(11.2e6, rel=0.02)


# Promise 15
def test_large_batches_have_lars_lamb_warm_up_scaling_and_accumulation(tmp_path: Path) -> None:
    figures = """
def moved(optimizer, scale):
    first = net()
    def loss(outputs, targets):
        return scale * nn.functional.cross_entropy(outputs, targets)
    result = tutti.train(net(), (INPUTS, TARGETS), batch_size=61, steps=1, workers=2, loss=loss,
                         **{**FIXED, "optimizer": optimizer})
    old, new = first[0].weight.detach(), result.model[0].weight.detach()
    return float((new - old).norm() / old.norm())

scaled = tutti.train("mlp", "digits", batch_size=128, optimizer="sgd", lr=0.1, epochs=9, workers=1,
                     schedule="linear_scaling", schedule_options={"factor": 4}, quiet=True)
rates = [record.lr for record in scaled.history]
whole, parts = trained(workers=2), trained(workers=2, accumulate=4)
print(json.dumps({"lamb": [moved("lamb", scale) for scale in (1, 1000)],
                  "lars": [moved("lars", scale) for scale in (1, 1000)],
                  "sgd": [moved("sgd", scale) for scale in (1, 1000)],
                  "rates": rates, "accumulated": apart(parts, whole)}))
"""
    found = program(torch_program(NET, figures), tmp_path).figures
    # The step is a share of the weights' norm, however large the gradient.
    assert found["lamb"][0] == pytest.approx(0.01, rel=1e-3)
    assert found["lamb"][1] == pytest.approx(found["lamb"][0], rel=1e-2)
    assert found["lars"][1] == pytest.approx(found["lars"][0], rel=0.05)
    assert found["sgd"][1] == pytest.approx(1000 * found["sgd"][0], rel=1e-9)
    assert found["rates"][-1] == pytest.approx(0.4, rel=1e-12)
    assert found["accumulated"] < 1e-12


def rows_of(chart: Path) -> list[dict[str, Any]]:
    """The data of a chart that an example has drawn."""
    found = json.loads(chart.read_text())
    return [row for rows in found.get("datasets", {}).values() for row in rows] or found["data"]["values"]


EXAMPLES = Path(__file__).parents[2] / "examples"


# Promise 16
def test_staleness_is_measured_and_remedied(tmp_path: Path) -> None:
    run(f"python {EXAMPLES / 'staleness.py'} --workers 64 --epochs 6 --out chart.json", tmp_path)
    rows = {(row["workers"], row["remedy"]): row for row in rows_of(tmp_path / "chart.json")}
    assert rows[64, "inverse"]["staleness"] > 30
    assert rows[64, "none"]["accuracy"] < 0.5 < 0.7 < rows[64, "delay compensated, adaptive"]["accuracy"]


# Promise 17
def test_virtual_ranks_give_accuracy_against_scale_the_same_bits_each_time(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        words = f"--workers 4 --epochs 1 --out {name}"
        run(f"python {EXAMPLES / 'accuracy_and_scale.py'} {words}", tmp_path)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    rows = [row for row in rows_of(tmp_path / "one.json") if row["workers"] == 4]
    assert all(3 < row["speed-up"] < 4 for row in rows)
    assert len({row["accuracy"] for row in rows if row["way"].startswith("synchronous")}) == 1


# Promise 33
def test_a_plan_is_measured_and_kept_with_the_run(tmp_path: Path) -> None:
    run("tutti plan mlp --precision fp32 --budget 2 --json plan.json", tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())
    options = "--plan auto --precision fp32 --budget 1 --steps 5"
    run(f"tutti train mlp {options} --out planned", tmp_path)
    chosen = json.loads((tmp_path / "planned" / "config.json").read_text())
    ranks = summary(tmp_path / "planned")["world"]["ranks"]
    assert (int(chosen["workers"]), chosen["precision"]) == (ranks, "fp32")
    run("tutti train --config planned --out again", tmp_path)
    assert weights_sha256(tmp_path / "again") == weights_sha256(tmp_path / "planned")
