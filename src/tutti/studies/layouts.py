"""The memory that a rank needs under each layout of a model. Runs on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tutti.comm.base import Communicator
from tutti.errors import BadModel, UserError
from tutti.model_parallel.base import Workload
from tutti.model_parallel.layout import DATA, WAYS, Layout, parse_layout, rank_need
from tutti.model_parallel.memory import MemoryNeed, held, of_teams, on_meta, peak_of_step, state_per_byte
from tutti.run.build import open_config_data, prepare_task, seeded
from tutti.run.jobs import load_job
from tutti.run.optimization import build_optimizer
from tutti.studies.layouts_job import LayoutsJob

HEADS = ("weights", "gradients", "optimizer", "activations", "in all")


def work(comm: Communicator, payload: bytes) -> dict[str, MemoryNeed | str]:
    """Print and return the memory that each layout needs, or why it is impossible (entry point)."""
    job = load_job(payload, LayoutsJob)
    config = job.config
    with seeded(config.seed):
        task = prepare_task(job, open_config_data(job, comm))
        state = state_per_byte(lambda module: build_optimizer(job, module))
        needs: dict[str, MemoryNeed | str] = {}
        for name, layout, ranks in _layouts(job):
            try:
                needs[name] = need_of(layout, ranks, task.module, task.workload(config.batch_size), state)
            except UserError as error:
                needs[name] = str(error)
    print(task.described())
    print(_table(needs, config.batch_size, config.optimizer), flush=True)
    return needs


def _layouts(job: LayoutsJob) -> Iterator[tuple[str, Layout | None, int]]:
    """Yield one rank, then every layout of the ranks, or the requested layout alone."""
    ranks = job.ranks
    yield "1 rank", None, 1
    if job.parallel is not None:
        layout = parse_layout(job.parallel, job.options, ranks)
        yield layout.describe(), layout, ranks
        return
    yield f"{DATA}={ranks}", None, ranks
    for team in [size for size in range(ranks, 1, -1) if ranks % size == 0]:
        for way in WAYS:
            layout = parse_layout(f"{DATA}={ranks // team},{way}={team}", {}, ranks)
            yield layout.describe(), layout, ranks


def need_of(
    layout: Layout | None, ranks: int, module: nn.Module, workload: Workload, state: float
) -> MemoryNeed:
    """Return the largest need of any rank; without a layout each rank has the whole model."""
    if layout is None:
        # Data parallelism on one host: shared weights, gradients for each rank, sliced state.
        model = on_meta(module)
        peak = peak_of_step(model, workload, -(-workload.batch_size // ranks))
        return of_teams(ranks, *held(model), state, peak)
    try:
        return rank_need(layout, module, workload, state)
    except (RuntimeError, NotImplementedError) as error:
        raise BadModel(
            f"the model cannot run on tensors without contents ({error}); train it for some steps instead"
        ) from error


def _table(needs: dict[str, MemoryNeed | str], batch_size: int, optimizer: str) -> str:
    width = max(len(name) for name in needs) + 2
    lines = [f"memory of the rank that needs most, MB; batch size {batch_size}, {optimizer}"]
    lines.append(f"{'':{width}}" + "".join(f"{head:>13}" for head in HEADS) + f"{'of 1 rank':>13}")
    first = next(iter(needs.values()))
    for name, need in needs.items():
        if isinstance(need, str):
            lines.append(f"{name:{width}}  not possible: {need}")
            continue
        numbers = need.weights, need.gradients, need.state, need.activations, need.total
        share = f"{need.total / first.total:.0%}" if isinstance(first, MemoryNeed) else ""
        lines.append(
            f"{name:{width}}" + "".join(f"{number / 1e6:>13,.1f}" for number in numbers) + f"{share:>13}"
        )
    return "\n".join(lines)
