"""A user's own loop: equal to the plain one, for even and uneven batches."""

from __future__ import annotations

import difflib
import multiprocessing
import re
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tests.own_loop.loops.base import children_allowed
from tests.own_loop.worlds import Worlds, job
from tests.preloaded import interpreter
from tutti.cli.main import main
from tutti.comm.shm.communicator import HostCommunicator
from tutti.errors import BadOption
from tutti.own_loop import distribute

ROOT = Path(__file__).parents[2]
SAMPLES = TensorDataset(torch.randn(23, 5, generator=torch.Generator().manual_seed(1)), torch.arange(23) % 3)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches, epochs: int = 2) -> list[Tensor]:
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.double()), targets).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [6, 4])
def test_distributed_loop_ends_with_the_weights_of_the_plain_one(
    worlds: Worlds, size: int, batch_size: int
) -> None:
    """23 samples in batches of 4 leave 3 for the last one: fewer than 5 ranks."""
    plain = train(*make(), DataLoader(SAMPLES, batch_size))

    def work() -> list[Tensor]:
        model, optimizer = distribute.distribute(*make())
        return train(model, optimizer, distribute.shard(DataLoader(SAMPLES, batch_size)))

    for weights in worlds.each(size, work):
        torch.testing.assert_close(weights, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_of_the_whole_batch_equals_one_process(worlds: Worlds, kind: type[nn.Module]) -> None:
    """The last batch has 3 samples, so a rank of 5 has none."""

    def normed(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = make()
        model = nn.Sequential(model, kind(3)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, optimizer = normed(nn.BatchNorm1d)
    expected = train(plain, optimizer, DataLoader(SAMPLES, 5)), [*plain.buffers()]

    def work() -> tuple[list[Tensor], list[Tensor]]:
        whole = kind is nn.BatchNorm1d
        model, optimizer = distribute.distribute(*normed(kind), sync_batchnorm=whole)
        weights = train(model, optimizer, distribute.shard(DataLoader(SAMPLES, 5)))
        return weights, [buffer.clone() for buffer in model.buffers()]

    for found in worlds.each(5, work):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_processes_of_a_loader_that_is_gone_are_gone(worlds: Worlds) -> None:
    def work() -> tuple[int, int]:
        samples, by = TensorDataset(torch.arange(8)), {"multiprocessing_context": "fork", "num_workers": 1}
        loader = DataLoader(samples, 4, persistent_workers=True, **by)
        with children_allowed(), torch.no_grad():
            assert len(list(distribute.shard(loader))) == 2
        there = len(multiprocessing.active_children())
        del loader
        return there, len(multiprocessing.active_children())

    assert worlds.each(2, work) == [(1, 0)] * 2


def test_example_differs_from_the_plain_loop_in_the_lines_that_the_readme_shows() -> None:
    plain, own = (
        (ROOT / "examples" / name).read_text().splitlines()[1:] for name in ("plain_loop.py", "own_loop.py")
    )
    changed = [line for line in difflib.unified_diff(plain, own, n=0) if re.match(r"[+-][^+-]", line)]
    assert len([line for line in changed if line[0] == "+"]) <= 4
    readme = (ROOT / "README.md").read_text()
    assert all(line in readme for line in changed)


@pytest.mark.timeout(180)
def test_example_on_two_ranks_prints_what_the_plain_loop_prints(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    subprocess.run([*interpreter(), "examples/plain_loop.py"], stdin=subprocess.DEVNULL, check=True)
    plain = capfd.readouterr().out.strip()
    assert re.fullmatch(r"\d+ of 397 correct", plain)
    assert main(["run", "-n", "2", "examples/own_loop.py"]) == 0
    assert capfd.readouterr().out.count(plain) == 2


@pytest.mark.timeout(180)
def test_the_gan_draws_the_same_on_one_rank_and_on_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    example = ROOT / "examples/gan.py"
    exact = "import runpy, torch\ntorch.set_default_dtype(torch.float64)\n"
    Path("exact.py").write_text(f"{exact}runpy.run_path({str(example)!r}, run_name='__main__')\n")
    subprocess.run([*interpreter(), "exact.py", "1"], stdin=subprocess.DEVNULL, check=True)
    alone = np.asarray(Image.open("gan.png"), dtype=np.int16)
    assert main(["run", "-n", "2", "exact.py", "1"]) == 0
    together = np.asarray(Image.open("gan.png"), dtype=np.int16)
    # Rounding may put a value on the other side of a border between two levels of grey.
    assert np.abs(together - alone).max() <= 1
    assert alone.std() > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear, None), r"the model is <class .*Linear.>; give an object"),
        ((nn.Linear(2, 1), None), "the optimizer is None"),
        ((*make(), "max"), "reduction is 'max'"),
        ((*make(), make()[1]), r"reduction is SGD \(; .* again for a second optimizer"),
        ((nn.Linear(2, 1), make()[1]), "no parameter of this model"),
    ],
)
def test_objects_that_cannot_be_distributed_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        distribute.distribute(*arguments)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tutti.shard(cast("Any", 5)),
        lambda: tutti.mean(1.0, -1),
        lambda: tutti.shard(tutti.shard([torch.zeros(3)])),
    ],
)
def test_wrong_batches_and_figures_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(BadOption):
        call()


def test_one_rank_keeps_the_weights_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ranks share is that of the CPU."""
    monkeypatch.setattr(distribute.strategies, "visible_memory", None)
    plain = train(*make(), DataLoader(SAMPLES, 4))
    with closing(HostCommunicator.alone()) as comm, job(comm):
        found = train(*distribute.distribute(*make()), distribute.shard(DataLoader(SAMPLES, 4)))
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
