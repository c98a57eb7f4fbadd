"""One NVIDIA GPU: tutti's training loop beside one written by hand, and where a GPU begins to pay.

    python benchmarks/gpu.py [--rounds 5]

First table: samples/s of `tutti.train(..., device="cuda", precision="bf16", layout="channels_last")`, as it
is and with `cuda_graph="off"`; and of loops written by hand with the same precision and layout and fused
Adam, the whole data set on the GPU: "eager", and "CUDA graph", the whole step captured and replayed. Batches
of 512, sides in turn, medians. Wanted: tutti at least as fast as the faster of the two.

Second table: forward, backward and optimizer of an MLP 784-width-width-10 in fp32, on all cores and on the
GPU with its batch there; the time to copy a batch there beside it.

Both go to benchmarks/RESULTS-gpu.md. With `--device cpu` the same code runs where no GPU is, to try it: then
there are no CUDA graphs, and nothing is written unless `--out` says where.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

import tutti
from measure import describe_machine, interleave, medians, table
from tutti import models

BATCH = 512
MODELS: dict[str, tuple[tuple[int, int, int], int]] = {
    "mlp": ((1, 28, 28), 400),
    "cnn": ((1, 28, 28), 200),
    "vgg11": ((3, 32, 32), 50),
}
"""By name: the shape of an input, and the steps of an epoch."""

SIDES = ("tutti", "tutti, no graph", "eager", "CUDA graph")
WIDTHS = (64, 256, 1024, 4096)
BATCHES = (32, 128, 512, 2048)
WANTED = 1.0
RESULTS = Path(__file__).parent / "RESULTS-gpu.md"


def main() -> None:
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no NVIDIA GPU that torch can use: nothing is measured, nothing written")
        return
    parts = [f"# Results on a GPU\n\n`python benchmarks/gpu.py`\n\n    {describe(args.device)}"]
    tables = (
        lambda: training(args.device, args.rounds, args.models, args.batch, args.steps),
        lambda: paying(args.device, args.rounds, args.widths, args.batches),
    )
    print(parts[0], flush=True)
    for measure in tables:
        parts.append(measure())
        print("\n" + parts[-1], flush=True)
        # After each table: should time run out, what there is stays.
        if args.out is not None:
            args.out.write_text("\n\n".join(parts) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="in the first table")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a step in the first table")
    parser.add_argument("--steps", type=int, help="of an epoch, instead of each model's own")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="in the second table")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="in the second table")
    parser.add_argument("--out", type=Path, help="where the results go")
    args = parser.parse_args()
    if args.out is None and args.device == "cuda":
        args.out = RESULTS
    return args


def describe(device: str) -> str:
    """The machine, and its GPU."""
    gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; " if device == "cuda" else ""
    return gpu + describe_machine()


# --- training


def training(device: str, rounds: int, models: Sequence[str], batch: int, steps: int | None) -> str:
    """The first table."""
    rows = []
    for model in models:
        shape, own_steps = MODELS[model]
        samples = (steps or own_steps) * batch
        inputs, targets = torch.randn(samples, *shape), torch.randint(10, (samples,))
        rate = medians(interleave(sides(model, inputs, targets, batch, device), rounds))
        ratio = rate["tutti"] / max(rate[side] for side in ("eager", "CUDA graph") if side in rate)
        verdict = f"{ratio:.2f} ({WANTED} {'reached' if ratio >= WANTED else 'MISSED'})"
        figures = [f"{rate[side]:,.0f}" if side in rate else "" for side in SIDES]
        rows.append([model, samples, *figures, verdict])
        print(*rows[-1], sep="  ", flush=True)
    heads = ["samples/s", "samples", *SIDES, "tutti / faster by hand"]
    about = (
        f"bf16, channels_last, Adam, batch {batch}; the second epoch of so many samples; median of {rounds}."
    )
    return f"## Training\n\n{about}\n\n{table(heads, rows)}"


def sides(
    model: str, inputs: Tensor, targets: Tensor, batch: int, device: str
) -> dict[str, Callable[[], float]]:
    """What is compared: each measures samples/s. Without CUDA there are no graphs."""

    def ours(graph: str) -> Callable[[], float]:
        return lambda: by_tutti(model, inputs, targets, batch, device, graph)

    def hand(graph: bool) -> Callable[[], float]:
        return lambda: by_hand(model, inputs, targets, batch, device, graph)

    found = {"tutti": ours("auto"), "eager": hand(False)}
    if device == "cuda":
        found |= {"tutti, no graph": ours("off"), "CUDA graph": hand(True)}
    return found


def by_tutti(model: str, inputs: Tensor, targets: Tensor, batch: int, device: str, graph: str) -> float:
    """Samples/s of the second epoch."""
    result = tutti.train(
        model,
        (inputs, targets),
        workers=1,
        device=device,
        cuda_graph=graph,
        precision="bf16",
        layout="channels_last",
        batch_size=batch,
        epochs=2,
        validation=0.0,
        metrics=[],
        quiet=True,
    )
    return result.history[-1].samples_per_s


def by_hand(model: str, inputs: Tensor, targets: Tensor, batch: int, device: str, graph: bool) -> float:
    """Samples/s of the second epoch."""
    module = models.build(model, tuple(inputs.shape[1:]), 10).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters(), fused=True, capturable=graph)
    inputs = inputs.to(device, memory_format=torch.channels_last)
    targets = targets.to(device)
    own_inputs, own_targets = inputs[:batch].clone(), targets[:batch].clone()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            outputs = module(own_inputs)
        nn.functional.cross_entropy(outputs.float(), own_targets).backward()
        optimizer.step()

    run = captured(step) if graph else step
    rate = 0.0
    for _ in range(2):
        synchronize(device)
        began = perf_counter()
        order = torch.randperm(len(inputs), device=device)
        for start in range(0, len(inputs), batch):
            chosen = order[start : start + batch]
            own_inputs.copy_(inputs[chosen])
            own_targets.copy_(targets[chosen])
            run()
        synchronize(device)
        rate = len(inputs) / (perf_counter() - began)
    return rate


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, which replays it on the same memory."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def synchronize(device: str) -> None:
    """Wait for all that was begun."""
    if device == "cuda":
        torch.cuda.synchronize()


# --- where a GPU begins to pay


def paying(device: str, rounds: int, widths: Sequence[int], batches: Sequence[int]) -> str:
    """The second table."""
    rows = []
    for width in widths:
        for batch in batches:
            there, copy = mlp_step(width, batch, device), batch_copy(batch, device)
            found = medians(
                interleave({"CPU": mlp_step(width, batch, "cpu"), "GPU": there, "copy": copy}, rounds)
            )
            both = found["GPU"] + found["copy"]
            figures = [f"{1e3 * found[side]:.3f}" for side in ("CPU", "GPU", "copy")]
            ratios = [f"{found['CPU'] / found['GPU']:.2f}", f"{found['CPU'] / both:.2f}"]
            rows.append([width, batch, *figures, *ratios])
    heads = ["width", "batch", "CPU ms", "GPU ms", "copy ms", "CPU / GPU", "CPU / (GPU + copy)"]
    about = f"One step of an MLP, fp32, Adam, median of {rounds}; above 1 in the last column the GPU pays."
    return f"## Where a GPU begins to pay\n\n{about}\n\n{table(heads, rows)}"


def mlp_step(width: int, batch: int, device: str) -> Callable[[], float]:
    """Measures the seconds of a step whose batch is on the device."""
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    module = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    inputs, targets = torch.randn(batch, 784, device=device), torch.randint(10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()

    return lambda: seconds(step, device)


def batch_copy(batch: int, device: str) -> Callable[[], float]:
    """Measures the seconds that a batch takes from pinned memory to the device."""
    inputs = torch.randn(batch, 784, pin_memory=device == "cuda")
    return lambda: seconds(lambda: inputs.to(device, copy=True), device)


def seconds(step: Callable[[], object], device: str, count: int = 20) -> float:
    """Of one call."""
    step()
    synchronize(device)
    began = perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (perf_counter() - began) / count


if __name__ == "__main__":
    main()
