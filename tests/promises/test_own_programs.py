"""Loops of one's own, and programs of torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.promises.command import program, run, torch_program

pytestmark = pytest.mark.timeout(400)

PLAIN = """
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(61, 6, dtype=torch.float64)
targets = (inputs.sum(1) > 0).long()
samples, order = TensorDataset(inputs, targets), torch.Generator().manual_seed(5)
loader = DataLoader(samples, batch_size=8, shuffle=True, generator=order)

def net(outputs):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs)).double()

encoder, critic = net(6), net(2)
one = torch.optim.Adam(encoder.parameters(), lr=0.01)
two = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
{DISTRIBUTE}
for epoch in range(3):
    for x, y in {SHARD}(loader):
        one.zero_grad()
        nn.functional.cross_entropy(critic(encoder(x)), y).backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 0.5)
        one.step()
        two.zero_grad()
        nn.functional.cross_entropy(critic(encoder(x).detach()), y).backward()
        two.step()
weights = torch.cat([p.detach().flatten() for model in (encoder, critic) for p in model.parameters()])
"""

DISTRIBUTE = "encoder, one = tutti.distribute(encoder, one); critic, two = tutti.distribute(critic, two)"


def loop(name: str, *, plain: bool = False) -> str:
    text = PLAIN.replace("{DISTRIBUTE}", "" if plain else DISTRIBUTE)
    text = text.replace("{SHARD}", "iter" if plain else "tutti.shard")
    write = f"open(f'{name}-{{tutti.init().rank}}.json', 'w').write(json.dumps(weights.tolist()))"
    return torch_program(text, write)


def weights(folder: Path, name: str, rank: int = 0) -> list[float]:
    found: list[float] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


# Promises 18 and 30
@pytest.mark.mpi
def test_three_lines_make_a_loop_of_two_models_parallel_under_every_launcher(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    launchers = {
        "alone": "python",
        "three": "tutti run -n 3",
        "two": "tutti run -n 2",
        "mpirun": "mpirun -n 2 python",
        "torchrun": "torchrun --standalone --nproc-per-node 2",
    }
    program(loop("plain", plain=True), tmp_path)
    expected = pytest.approx(weights(tmp_path, "plain"), rel=1e-10, abs=1e-12)
    for name, launcher in launchers.items():
        program(loop(name), tmp_path, launcher)
        assert weights(tmp_path, name) == expected
    for name in ("two", "mpirun", "torchrun"):
        assert weights(tmp_path, name, 1) == weights(tmp_path, "two")


RESUMED = """
import sys
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 6, dtype=torch.float64)
targets = (inputs.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = tutti.distribute(model, optimizer)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
until, name = int(sys.argv[1]), sys.argv[2]
run = tutti.checkpoints(sys.argv[3])
step = run.restore()
for epoch in range(run.values.get("epoch", 0), 4):
    for x, y in tutti.shard(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            run.save(step, epoch=epoch)
        if step == until:
            sys.exit(9)
found = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
if tutti.init().rank == 0:
    open(f"{name}.json", "w").write(json.dumps([step, found]))
"""


# Promises 9 and 18
def test_a_loop_of_ones_own_goes_on_in_mid_epoch_on_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(torch_program(RESUMED))
    run("tutti run -n 2 loop.py 0 whole never-stopped", tmp_path)
    run("tutti run -n 2 loop.py 13 none stopped", tmp_path, code=1)
    run("tutti run -n 3 loop.py 0 resumed stopped", tmp_path)
    (step, whole), (steps, resumed) = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "resumed")
    )
    assert step == steps == 32
    assert resumed == pytest.approx(whole, rel=1e-10, abs=1e-12)


BACKEND = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("tutti")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2
torch.manual_seed(0)
inputs = torch.randn(12, 6, dtype=torch.float64)
targets = torch.arange(12) % 2

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

def trained(wrap, mine):
    model = net()
    used = wrap(model) or model
    optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(used(inputs[mine]), targets[mine]).backward()
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])

mesh = init_device_mesh("cpu", (size,))
share = slice(6 * rank, 6 * rank + 6)
expected = trained(lambda model: None, slice(None))
found = {
    "ddp": trained(DistributedDataParallel, share),
    "fsdp2": trained(lambda model: fully_shard(model, mesh=mesh) and None, share),
}
errors = {name: float((one - expected).abs().max()) for name, one in found.items()}
left, right = inputs, inputs.T.contiguous()
product = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Shard(1)])
errors["dtensor"] = float((product.full_tensor() - inputs @ inputs.T).abs().max())
parts = [net()[:2], net()[2:]]
schedule = ScheduleGPipe(PipelineStage(parts[rank], rank, size, torch.device("cpu")), n_microbatches=3)
outputs = schedule.step(inputs) if rank == 0 else schedule.step()
errors["pipeline"] = 0.0 if rank == 0 else float((outputs - net()(inputs)).abs().max())
open(f"errors-{rank}.json", "w").write(json.dumps(errors))
dist.destroy_process_group()
"""


# Promise 28
@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["torchrun --standalone --nproc-per-node 2", "mpirun -n 2 python"])
def test_programs_of_torch_distributed_run_unchanged(tmp_path: Path, launcher: str) -> None:
    if launcher.startswith("mpirun"):
        pytest.importorskip("mpi4py")
    program(torch_program(BACKEND), tmp_path, launcher)
    for rank in range(2):
        errors = json.loads((tmp_path / f"errors-{rank}.json").read_text())
        assert errors.keys() == {"ddp", "fsdp2", "dtensor", "pipeline"}
        assert max(errors.values()) < 1e-12
