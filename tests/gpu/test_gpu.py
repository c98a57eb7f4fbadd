"""What needs an NVIDIA GPU: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from tests.ecosystem.jobs import torchrun
from tests.ecosystem.outcomes import DEVICE, RANKS, assert_same_on_every_rank
from tutti.cli.main import main
from tutti.errors import NotFinite
from tutti.models import build
from tutti.training import cuda_graph
from tutti.training.precision import Arithmetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CHECKS = (
    "plain",
    "small_buckets_that_are_the_gradients",
    "unused_parameters",
    "gradients_accumulated_without_exchange",
    "uneven_inputs",
    "halves_on_the_wire",
    "sharded_optimizer",
)

TOLERANCES = {"halves_on_the_wire": 1e-3, "sharded_optimizer": 1e-8}
"""Half-precision numbers may be rounded to the other of two neighbours; Adam divides the gradient of a bias
in front of a BatchNorm, which is the rounding of zero (1e-17), by its epsilon of 1e-8."""


def outcomes(backend: str, devices: str, ranks: int, folder, checks: tuple[str, ...]) -> None:
    done = torchrun(
        "data_parallel.py", str(folder), backend, ",".join(checks), ranks=ranks, settings={DEVICE: devices}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compare(backend: str, devices: str, ranks: int, folder, checks: tuple[str, ...] = CHECKS) -> None:
    outcomes("gloo", "cpu", ranks, folder, checks)
    outcomes(backend, devices, ranks, folder, checks)
    for check in checks:
        tolerance = TOLERANCES.get(check, 1e-10)
        assert_same_on_every_rank(folder, check, backends=("gloo", backend), ranks=ranks, tolerance=tolerance)


def test_ranks_that_share_one_gpu_exchange_through_host_memory(tmp_path):
    compare("tutti", "cuda:0", RANKS, tmp_path, (*CHECKS, "objects"))


class Own(nn.Sequential):
    """A class of the user's, as graphs know nothing of."""


def own(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Own(*build("cnn", shape, outputs))


def trained(model="cnn", device: str = "cuda", **options) -> tutti.Result:
    options = {"steps": 30, **options}
    return tutti.train(model, "digits", workers=1, device=device, quiet=True, **options)


def losses(result: tutti.Result) -> list[float]:
    return [epoch.train.loss for epoch in result.history]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("graph", ["auto", "off"])
def test_training_on_the_gpu_follows_training_on_the_cpu(precision: str, graph: str) -> None:
    options = {"precision": precision, "metrics": "accuracy,top5"}
    expected, found = trained(device="cpu", **options), trained(cuda_graph=graph, **options)
    tolerance = 1e-2 if precision == "fp32" else 1e-6
    assert losses(found) == pytest.approx(losses(expected), rel=tolerance)
    assert found.summary.test.metrics == pytest.approx(expected.summary.test.metrics, abs=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "mlp", "model_options": {"dropout": 0.5}},
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "clip_norm": 0.5},
        {"schedule": "one_cycle", "clip_value": 0.01},
        {"optimizer": "rmsprop", "strategy": tutti.Sync(every=2)},
        {"model": own, "cuda_graph": "on"},
        {"model": own, "optimizer": "lamb"},
        {"strategy": "local"},
    ],
    ids=["dropout", "clipped", "one cycle", "every 2", "graph of an own model", "lamb", "local"],
)
def test_options_work_on_the_gpu(options: dict) -> None:
    found = losses(trained(epochs=3, **{"steps": None, **options}))
    assert found[-1] < found[0]


def test_a_model_of_torchs_layers_is_recorded_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    recorder = cuda_graph.CudaRecorder
    record = recorder.record
    monkeypatch.setattr(recorder, "record", lambda self, work: recorded.append(work) or record(self, work))
    trained(epochs=2, steps=None)
    trained(own)
    assert len(recorded) == 1


def test_samples_that_have_no_room_on_the_gpu_come_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained()
    monkeypatch.setattr(Arithmetic, "has_room_for", lambda self, nbytes: False)
    assert losses(trained()) == pytest.approx(losses(expected), rel=1e-2)


CALLS: list[int] = []


def strict(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss; from its 20th call to its 40th, waiting for the GPU raises an error."""
    CALLS.append(len(targets))
    torch.cuda.set_sync_debug_mode("error" if 20 <= len(CALLS) < 40 else "default")
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nobody_waits_for_the_gpu_in_a_step() -> None:
    CALLS.clear()
    try:
        trained(loss=strict, metrics="none", validation=0.0, steps=44)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(CALLS) > 44


def test_a_loss_that_is_not_finite_is_found_on_the_gpu() -> None:
    with pytest.raises(NotFinite, match=r"the loss became (nan|inf) in steps 1 to 30"):
        trained(optimizer="sgd", lr=1e30)


def test_a_run_of_the_gpu_is_traced_and_evaluated_on_the_cpu_too(tmp_path) -> None:
    words = f"train cnn -n 1 --device cuda --steps 40 --trace --out {tmp_path / 'run'}"
    assert main(words.split()) == 0
    for device in ("cpu", "cuda"):
        assert main(["evaluate", str(tmp_path / "run"), "-n", "1", "--device", device]) == 0
