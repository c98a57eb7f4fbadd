"""Two hosts on a slow link: DDP + Gloo, sync, with compression, local SGD, DiLoCo and others (needs root).

    sudo python benchmarks/slow_link.py [--mbit 100] [--delay-ms 10] [--epochs 3] [--sides sync,diloco]

Each host is a network namespace with one rank of one thread. The link is a program that passes on the packets
(of 9,000 bytes) between two tun devices: 100 Mbit/s each way, 10 ms later, so 20 ms for a round trip. A
perceptron of 1.9 million parameters learns MNIST; a step has 100 samples, 50 of each rank.

First, on a link without limits, every side trains for some epochs: this gives the steps to the loss on
validation samples that `sync` has after the first epoch, and the accuracy on the test part. DDP computes what
`sync` computes. Then, on the slow link, every side makes some steps: seconds and bytes per step, the bytes by
the counters of rank 0's interface. Time to the loss is steps times seconds per step. Utilisation is the time
of plain torch without any exchange, on both ranks at once, over the time of the side, for the same steps.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import select
import struct
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import mean
from time import monotonic, perf_counter
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.cluster.hosts import Hosts, _ip  # noqa: E402

TUNSETIFF, TUN_OF_PACKETS = 0x400454CA, 0x1001  # IFF_TUN | IFF_NO_PI
BATCH, LR, HIDDEN = 100, 1e-3, [1024, 1024]
DDP, ALONE = "DDP + Gloo", "without exchange"
H = 500
SIDES: dict[str, tuple[str, dict[str, Any], int]] = {
    ALONE: ("", {}, 200),
    DDP: ("", {}, 30),
    "sync": ("sync", {}, 30),
    "sync int8": ("sync", {"compress": "int8"}, 60),
    "sync top 1 %": ("sync", {"compress": "top_k", "keep": 0.01}, 60),
    "local": ("local", {"every": 8}, 160),
    "diloco": ("diloco", {"every": H, "outer_momentum": 0.5}, H),
    "sparseloco": ("sparseloco", {"every": H}, H),
    "noloco": ("noloco", {"every": H}, H),
}
"""By name: strategy, its options, and the steps on the slow link."""


class SlowHosts(Hosts):
    """Two hosts whose packets this process passes on, at a rate in bytes per second and after a delay."""

    def __init__(self, rate: float, delay_s: float) -> None:
        super().__init__(["a", "b"])
        self._speed, self._delay_s, self._tuns = rate, delay_s, list[int]()

    def _build(self) -> None:
        super()._build()
        for number, (name, end) in enumerate(self._ends.items(), start=1):
            space = self.namespace(name)
            _ip("-n", space, "link", "del", end)
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", end.encode(), TUN_OF_PACKETS))
            self._tuns.append(tun)
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            _ip("-n", space, "link", "set", end, "mtu", "9000", "up")
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        free = [0.0, 0.0]  # when the link has sent all that it was given, by direction
        with suppress(OSError):  # In the end the tuns are gone with their namespaces.
            while True:
                due = min((queue[0][0] for queue in queues if queue), default=monotonic() + 1)
                ready = select.select(self._tuns, [], [], max(0.0, due - monotonic()))[0]
                for side, tun in enumerate(self._tuns):
                    now = monotonic()
                    packet = os.read(tun, 1 << 16) if tun in ready else b""
                    if packet and len(queues[side]) < 1000:  # as netem drops them
                        free[side] = max(now, free[side]) + len(packet) / self._speed
                        queues[side].append((free[side] + self._delay_s, packet))
                    queue = queues[1 - side]
                    while queue and queue[0][0] <= now:
                        os.write(tun, queue.popleft()[1])


def run(hosts: Hosts, name: str, steps: int = 0, epochs: int = 0) -> dict[str, Any]:
    """Train one side on both hosts; returns what rank 0 has found."""
    words = [sys.executable, __file__, "--rank", name, "--steps", str(steps), "--epochs", str(epochs)]
    done = hosts.mpirun({"a": 1, "b": 1}, words, timeout_s=900)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise RuntimeError(f"{name} has failed: {done.stdout}\n{done.stderr}")
    return json.loads(found[0])


def interface() -> str:
    """The name of this host's end of the link."""
    return next(name for name in os.listdir("/sys/class/net") if name.startswith("tu"))


def sent() -> int:
    """Bytes that have left this host."""
    return int(Path(f"/sys/class/net/{interface()}/statistics/tx_bytes").read_text())


def train_by_ddp(steps: int, exchanges: bool) -> dict[str, Any]:
    """Steps of plain torch; `exchanges` sums the gradients."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from tutti import models
    from tutti.comm.shm.communicator import HostCommunicator
    from tutti.data import Batches, open_data

    part = open_data("mnist", HostCommunicator.alone(), validation=0.0).train
    os.environ["GLOO_SOCKET_IFNAME"] = interface()
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    dist.init_process_group("gloo", "tcp://10.77.0.1:29500", rank=rank, world_size=2)
    torch.manual_seed(0)
    module = DistributedDataParallel(models.build("mlp", part.shape, 10, {"hidden": HIDDEN}))
    optimizer = torch.optim.Adam(module.parameters(), lr=LR, fused=True)
    batches = Batches(part, BATCH, rank, 2)
    measured = (0.0, 0)
    for number, (batch,) in batches.epoch(0, 0, steps + 5):
        if number == 5:  # The first ones make buckets, and open connections.
            dist.barrier()
            measured = perf_counter(), sent()
        module.require_backward_grad_sync = exchanges
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
        optimizer.step()
    dist.barrier()
    return {"seconds": perf_counter() - measured[0], "bytes": sent() - measured[1]}


def train_by_tutti(strategy: str, options: dict[str, Any], steps: int, epochs: int) -> dict[str, Any]:
    """The same by a strategy; by epochs with evaluations, by steps without."""
    import tutti

    class Counts(tutti.Callback):
        def begin(self, course: Any) -> None:
            self.before = sent()

        def epoch(self, course: Any, record: Any) -> None:
            self.bytes = sent() - self.before

    counts, own = Counts(), BATCH if strategy == "sync" else BATCH // 2
    length = {"epochs": epochs, "validation": 0.1} if epochs else {"steps": steps, "validation": 0.0}
    done = tutti.train(
        "mlp", "mnist", strategy=strategy, strategy_options=options, model_options={"hidden": HIDDEN},
        optimizer="adam", lr=LR, batch_size=own, callbacks=counts, out=None, quiet=True, **length,
    )  # fmt: skip
    if epochs:
        curve = [(record.step, record.validation.loss) for record in done.history]
        return {"curve": curve, "accuracy": done.summary.test.metrics["accuracy"]}
    return {"seconds": done.history[-1].seconds["total"], "bytes": counts.bytes}


def report(args: argparse.Namespace) -> None:
    """Measure the sides one after the other, and print a table."""
    from measure import describe_machine, table

    sides = [DDP, *(list(SIDES)[2:] if args.sides is None else args.sides.split(","))]
    print(describe_machine(), flush=True)
    learned: dict[str, Any] = {}
    if args.epochs:
        with Hosts(["a", "b"]) as hosts:
            trained = dict.fromkeys(["sync", *sides[1:]])
            learned = {name: run(hosts, name, epochs=args.epochs) for name in trained}
        learned[DDP] = learned["sync"]
    slow: dict[str, list[tuple[float, float]]] = {}
    with SlowHosts(args.mbit * 1e6 / 8, args.delay_ms / 1000) as hosts:
        for name in [ALONE, *sides, ALONE]:
            steps = max(1, round(SIDES[name][2] * args.share))
            found = run(hosts, name, steps=steps)
            slow.setdefault(name, []).append((found["seconds"] / steps, found["bytes"] / steps))
            print(f"{name}: {steps} steps in {found['seconds']:.1f} s, {found['bytes']:,} bytes", flush=True)
    alone = mean(seconds for seconds, _ in slow.pop(ALONE))
    rows, first = [], slow[DDP][0]
    for name, ((seconds, nbytes),) in slow.items():
        row = [name, f"{1e3 * seconds:,.1f}", f"{nbytes / 1e3:,.1f}", f"{first[1] / nbytes:,.1f}x"]
        row += [f"{alone / seconds:.0%}"]
        if learned:
            goal = learned["sync"]["curve"][0][1]
            count = next((step for step, loss in learned[name]["curve"] if loss <= goal), math.inf)
            by_ddp = learned["sync"]["curve"][0][0] * first[0]
            row += [count, f"{count * seconds:,.1f}", f"{by_ddp / (count * seconds):,.1f}x"]
            row += [f"{learned[name]['accuracy']:.2%}"]
        rows.append(row)
    heads = ["side", "ms/step", "kB/step", "fewer bytes", "utilisation"]
    heads += ["steps to the loss", "s to the loss", "faster", "accuracy"] if learned else []
    print(table(heads, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of each way")
    parser.add_argument("--epochs", type=int, default=3, help="on the link without limits; 0: none")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps on the slow link, for a try")
    parser.add_argument("--sides", help="beside DDP; by default all that there are")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.rank is None:
        report(args)
        return
    strategy, options, _ = SIDES[args.rank]
    if strategy:
        found = train_by_tutti(strategy, options, args.steps, args.epochs)
    else:
        found = train_by_ddp(args.steps, exchanges=args.rank == DDP)
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
