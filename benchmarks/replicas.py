"""The time of the checksums by which ranks compare what they hold alike, beside that of a step.

    python benchmarks/replicas.py

Weights and the state of Adam in float32, all on one rank: of several, each has a slice. Checksums and steps
of 64 samples are taken in turn, as seconds of one core. The medians are shown, and the share of the time at
the default, one comparison in 1,000 steps. What the ranks tell each other besides is a few bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

import torch
from torch import Tensor, nn
from torch.nn import functional

from measure import describe_machine, interleave, medians, table
from tutti import models
from tutti.checksum import checksum
from tutti.run.config import TrainConfig

BATCH, ROUNDS, TIMES = 64, 9, 10
MODELS: dict[str, dict[str, object]] = {
    "mlp": {},
    "lenet": {},
    "cnn": {},
    "mlp 2048-2048": {"hidden": [2048, 2048]},
}


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """Seconds of this thread that a call takes, the mean of several."""

    def measure() -> float:
        began = thread_time()
        for _ in range(TIMES):
            function()
        return (thread_time() - began) / TIMES

    return measure


def sides_of(module: nn.Module) -> tuple[dict[str, Callable[[], float]], int]:
    """The two sides, and the bytes that are added up."""
    inputs, targets = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    optimizer = torch.optim.Adam(module.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()

    step()
    tensors: list[Tensor] = [parameter.detach() for parameter in module.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]

    def look() -> None:
        for tensor in tensors:
            checksum(tensor)

    return {"step": timed(step), "checksums": timed(look)}, sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    torch.set_num_threads(1)
    print(describe_machine())
    rows = []
    for name, options in MODELS.items():
        module = models.build(name.split()[0], (1, 28, 28), 10, options)
        sides, nbytes = sides_of(module)
        found = medians(interleave(sides, ROUNDS))
        step, look = found["step"], found["checksums"]
        share = look / TrainConfig.check_replicas / step
        rows.append([name, f"{nbytes / 1e6:.1f}", f"{step * 1e3:.2f}", f"{look * 1e3:.3f}", f"{share:.3%}"])
    print(table(["model", "MB", "step, ms", "checksums, ms", "share of the time"], rows))


if __name__ == "__main__":
    main()
