"""Time-lines: what each of a few virtual workers did when, drawn from a run under a virtual clock.

The gradients are real and so are the messages; the clock is that of `tutti.comm.virtual`, so a drawing is the
same wherever it is made.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import Clip, Strategy, place

WORKERS: Final = 4
STEPS: Final = 6
PASS_S: Final = (1.0e-3, 1.15e-3, 1.3e-3, 1.9e-3)
"""How long a forward and backward pass of each worker takes: no two are equally fast."""
NETWORK: Final = Network(local_latency_s=2e-5, local_bandwidth_bytes_per_s=2e8)
"""Links between the workers that are slow enough for exchanges of a small model to be seen."""
WIDTH: Final = 720
LANE: Final = 30
LEFT: Final = 74


@dataclass(frozen=True)
class Span:
    """What one worker did in one stretch of time.

    Attributes:
        kind: "compute" (forward and backward) or "exchange" (the strategy's step, with its waiting).
        begin_s, end_s: virtual seconds.
    """

    kind: str
    begin_s: float
    end_s: float


def trace(strategy: Strategy) -> list[list[Span]]:
    """Run a small model with a strategy; returns each worker's stretches of time."""

    def program(comm: Communicator) -> list[Span]:
        torch.manual_seed(comm.rank)
        model = nn.Linear(64, 64)
        replica = place(model, comm, strategy.home)
        worker = strategy.worker(replica, comm, torch.optim.SGD(model.parameters(), lr=1e-3), Clip())
        spans: list[Span] = []
        origin = comm.clock()
        for _ in range(STEPS):
            begin = comm.clock()
            comm.compute(PASS_S[comm.rank])
            model(torch.randn(8, 64)).square().mean().backward()
            middle = comm.clock()
            worker.step()
            spans.append(Span("compute", begin - origin, middle - origin))
            spans.append(Span("exchange", middle - origin, comm.clock() - origin))
        worker.finish()
        return spans

    return VirtualWorld(min(WORKERS, strategy.most_workers or WORKERS), network=NETWORK).run(program)


def drawing(found: list[list[Span]], label: str) -> str:
    """The stretches of time as SVG: a lane for each worker, in the colours of the page."""
    last = max(span.end_s for spans in found for span in spans)
    scale = (WIDTH - LEFT - 8) / last
    height = LANE * len(found) + 26
    name = html.escape(label, quote=True)
    parts = [f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">']
    for worker, spans in enumerate(found):
        top = worker * LANE + 4
        parts.append(f'<text x="0" y="{top + 16}">worker {worker}</text>')
        for span in spans:
            x, width = LEFT + span.begin_s * scale, (span.end_s - span.begin_s) * scale
            if width > 0.05:
                place = f'x="{x:.1f}" y="{top}" width="{max(width, 0.8):.1f}" height="22"'
                parts.append(f'<rect class="{span.kind}" {place}/>')
    y = LANE * len(found) + 8
    parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 8}" y2="{y}"/>')
    for millisecond in range(int(last * 1e3) + 1):
        if millisecond % 2 == 0:
            x = LEFT + millisecond * 1e-3 * scale
            parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 14}">{millisecond} ms</text>')
    return "".join([*parts, "</svg>"])
