"""The memory layouts on one thread: forward and backward of models, and of their parts, in CPU time.

    python benchmarks/layouts.py [--models lenet,cnn] [--batch-size 64] [--rounds 15]
    python benchmarks/layouts.py --precision bf16 --models cnn,vgg11,resnet18 --rounds 7

The second compares fp32 with bf16 in the first two layouts; wanted: bf16 in channels_last at least 2.5 times
as fast as contiguous fp32 on processors with a unit for it (AMX or avx512_bf16).

CPU time does not count the work of other programs, so the machine need not be quiet; caches are shared all
the same. Sides are measured in turn, medians; a ratio is the median of those within each round. fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn import functional
from tutti.launch.malloc import keep_memory

from measure import describe_machine, interleave, table
from tutti import models
from tutti.training.precision import Arithmetic

LAYOUTS = ("contiguous", "channels_last", "batch_last")
SHAPE = (1, 28, 28)
GREY = ("mlp", "lenet", "cnn")
"""Models measured on images of that shape; the others on (3, 32, 32)."""
PARTS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1 map to 6, 5 x 5, 28 x 28": (lambda: nn.Conv2d(1, 6, 5, padding=2), SHAPE),
    "6 maps to 16, 5 x 5, 14 x 14": (lambda: nn.Conv2d(6, 16, 5), (6, 14, 14)),
    "32 maps to 64, 3 x 3, 14 x 14": (lambda: nn.Conv2d(32, 64, 3, padding=1), (32, 14, 14)),
    "128 maps to 128, 3 x 3, 8 x 8": (lambda: nn.Conv2d(128, 128, 3, padding=1), (128, 8, 8)),
    "pooling of 6 maps, 28 x 28": (lambda: nn.MaxPool2d(2), (6, 28, 28)),
    "pooling of 64 maps, 14 x 14": (lambda: nn.MaxPool2d(2), (64, 14, 14)),
}


def timed(step: Callable[[], object], times: int) -> float:
    """The CPU time of a step in milliseconds."""
    start = process_time()
    for _ in range(times):
        step()
    return (process_time() - start) / times * 1e3


def model_step(layout: str, name: str, batch_size: int, precision: str = "fp32") -> Callable[[], object]:
    """Forward and backward of a model."""
    torch.manual_seed(0)
    arithmetic = Arithmetic(layout=layout, precision=precision)
    shape = SHAPE if name in GREY else (3, 32, 32)
    module = arithmetic.prepare(models.build(name, shape, 10))
    images, labels = torch.randn(batch_size, *shape), torch.arange(batch_size) % 10

    def step() -> None:
        module.zero_grad()
        functional.cross_entropy(arithmetic.forward(module, arithmetic.inputs(images)), labels).backward()

    return step


def both_precisions(name: str, batch_size: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of a model by precision and layout."""
    return {
        f"{precision} {layout}": model_step(layout, name, batch_size, precision)
        for precision in ("fp32", "bf16")
        for layout in LAYOUTS[:2]
    }


def part_step(
    layout: str, made: Callable[[], nn.Module], shape: tuple[int, ...], batch: int
) -> Callable[[], object]:
    """Forward and backward of a layer between others of its layout; what has one map is a model's first."""
    arithmetic = Arithmetic(layout=layout)
    module = arithmetic.prepare(made())
    given = laid(torch.randn(batch, *shape), layout).requires_grad_(shape[0] > 1)
    gradient = laid(torch.randn_like(arithmetic.forward(module, given)), layout)

    def step() -> None:
        module.zero_grad()
        given.grad = None
        arithmetic.forward(module, given).backward(gradient)

    return step


def laid(images: Tensor, layout: str) -> Tensor:
    """Images of shape (n, maps, height, width) in a layout."""
    if layout == "batch_last":
        return images.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    return images.contiguous(memory_format=getattr(torch, f"{layout}_format", torch.channels_last))


def row(name: str, steps: Mapping[str, Callable[[], object]], rounds: int, times: int) -> list[str]:
    """The times of a table's row, and the ratio to the first side."""
    found = interleave({layout: partial(timed, step, times) for layout, step in steps.items()}, rounds)
    first, *_, last = found.values()
    ratio = median(a / b for a, b in zip(first, last, strict=True))
    return [name, *(f"{median(values):.2f}" for values in found.values()), f"{ratio:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="lenet,cnn", help="comma-separated")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    batch = args.batch_size
    about = f"ms of CPU time, forward and backward, one thread, batch of {batch}, median of {args.rounds}\n"
    if args.precision == "bf16":
        rows = [row(name, both_precisions(name, batch), args.rounds, 2) for name in args.models.split(",")]
        print(describe_machine(), about, sep="\n")
        print(table(("", *both_precisions("mlp", 1), "first / last"), rows))
        return
    rows = [
        row(name, {layout: model_step(layout, name, batch) for layout in LAYOUTS}, args.rounds, 4)
        for name in args.models.split(",")
    ]
    rows += [
        row(name, {layout: part_step(layout, *part, batch) for layout in LAYOUTS}, args.rounds, 4)
        for name, part in PARTS.items()
    ]
    print(describe_machine(), about, sep="\n")
    print(table(("", *LAYOUTS, "contiguous / batch_last"), rows))


if __name__ == "__main__":
    main()
