"""The fastest way to run a training on this machine, found by measuring. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from typing_extensions import override

from tutti.comm.shm.arena import Arena
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadOption
from tutti.launch.busy_cores import BUSY
from tutti.launch.cores import Cores, allowed_cores, processor_flags
from tutti.launch.placement import Placement
from tutti.records.run_folder import check_writable
from tutti.run.config import DEFAULT_EPOCHS, TrainConfig
from tutti.run.jobs import Job
from tutti.run.start import announce, run
from tutti.studies.autotune.candidates import Choices, choices_for
from tutti.studies.autotune.recommendation import Recommendation
from tutti.studies.autotune.remembered import RememberedPlan, find, keep, place_of
from tutti.studies.crossing import refuse_launcher

BUDGET_S: Final = 50.0
"""The default seconds for a plan."""

SHARE: Final = 0.05
"""The share of a run that its plan may cost."""

RESTART_S: Final = 0.1
"""Seconds of that share for starting the ranks that train, when the measuring ranks have ended."""

MUCH_LONGER: Final = 4.0
"""A run that allows this many times as long for a plan measures again."""

BF16_UNITS: Final = {"amx_bf16", "avx512_bf16", "bf16"}
"""Features of processors that make bf16 fast, by their names in /proc/cpuinfo."""


@dataclass(frozen=True)
class PlanJob(Job):
    """Measurements of the ways to run a training."""

    entry: ClassVar[str] = "tutti.studies.autotune.measure:work"
    announced: ClassVar[bool] = False

    choices: Choices
    dared: tuple[str, ...]  # precisions with more rounding, chosen if they are faster and their loss follows
    cores: Cores  # of this host, shared by the ranks
    budget_s: float  # seconds for the measurements, once the data are read
    for_run: bool = False  # they may also take at most `SHARE` of the run
    exhaustive: bool = False  # stop no slow way early
    # the arena where the ranks that train find the data; None: nothing trains
    data: FileAddress | None = None

    @override
    def placement(self) -> Placement:
        # Ranks are not bound at the start: they need different cores for each way.
        return Placement(max(ranks for ranks, _ in self.choices.shapes), 1)

    def allowance_s(self, samples: int, update_s: float) -> float:
        """Return the seconds that measuring may take, if an update takes `update_s`.

        A run that ends at a goal may need all its epochs.
        """
        if not self.for_run:
            return self.budget_s
        return min(self.budget_s, SHARE * run_length(self.config, samples) * update_s - RESTART_S)


def run_length(config: TrainConfig, samples: int) -> int:
    """Return the number of updates of a run, by its configuration."""
    return config.steps or (config.epochs or DEFAULT_EPOCHS) * max(1, -(-samples // config.batch_size))


def plan(
    config: TrainConfig,
    fixed: Collection[str] = (),
    *,
    budget_s: float = BUDGET_S,
    precisions: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    exhaustive: bool = False,
    quiet: bool = False,
) -> Recommendation:
    """Measure the ways to run a training on this machine, and remember the fastest.

    Args:
        config: what to train.
        fixed: the fields of `config` to keep: of workers, threads, precision, layout, batch_size.
        budget_s: seconds for measuring, give or take one step.
        precisions: to choose from by speed alone; by default the configured one, or bf16 if it is faster and
            its loss follows.
        batch_sizes: to choose from; by default the configured one, as another one trains differently.
        exhaustive: measure all ways until the budget is used up.
        quiet: print only the budget and warnings.

    Raises:
        UserError: the options contradict each other or the launcher, or leave nothing to choose from.
        TuttiError: a rank failed.
    """
    _refuse_elsewhere(config, budget_s)
    cores = allowed_cores()
    choices = choices_for(config, fixed, cores.usable, precisions, batch_sizes)
    dared = () if precisions else _dared(config, fixed)
    announce(f"measuring for at most {budget_s:g} s once the ranks have started")
    return _measured(PlanJob(config, choices, dared, cores, budget_s, exhaustive=exhaustive, quiet=quiet))


@contextmanager
def planned(
    config: TrainConfig, fixed: Collection[str], budget_s: float, *, fresh: bool = False
) -> Iterator[tuple[TrainConfig, FileAddress | None]]:
    """Yield the configuration with the fastest way to train, and the address of the data set if it was read.

    The plan is remembered, or measured in at most `SHARE` of the run and `budget_s`. Its choice and reason
    are printed. `fixed` and errors are as for `plan`.
    """
    if config.out is not None:
        check_writable(config.out)  # Measuring would be wasted.
    _refuse_elsewhere(config, budget_s)
    cores = allowed_cores()
    choices = choices_for(config, fixed, cores.usable)
    job = PlanJob(config, choices, _dared(config, fixed), cores, budget_s, for_run=True, quiet=True)
    known = None if fresh else _remembered(job)
    if known is not None:
        announce(f"{known.pick}: remembered from {known.date}; --plan fresh measures again")
        yield known.pick.applied_to(config), None
        return
    announce(f"measuring for at most {SHARE:.0%} of the run, and {budget_s:g} s")
    with closing(Arena.create()) as arena:
        recommendation = _measured(replace(job, data=arena.address))
        for line in recommendation.in_short():
            announce(line)
        yield recommendation.pick.candidate.applied_to(config), arena.address


def _measured(job: PlanJob) -> Recommendation:
    """Start the ranks that measure; remember the pick, unless other programs used the cores."""
    recommendation = run(job)
    assert isinstance(recommendation, Recommendation)
    pick = recommendation.pick
    if recommendation.waited > BUSY:
        announce(
            f"warning: ranks waited {recommendation.waited:.0%} of the time for a core, as other programs "
            "compute, so the pick may be wrong; plan again on an idle machine"
        )
    elif pick.rate and recommendation.allowed_s > 0:
        update_s = pick.candidate.batch_size / pick.rate
        found = RememberedPlan(pick.candidate, update_s, recommendation.samples, recommendation.allowed_s)
        keep(_place(job), found)
    return recommendation


def _remembered(job: PlanJob) -> RememberedPlan | None:
    """Return the remembered plan, unless the run allows a much longer measurement."""
    known = find(_place(job))
    ways = replace(job.choices, precisions=(*job.choices.precisions, *job.dared))
    if known is None or known.pick not in ways.candidates():
        return None
    allowed_s = job.allowance_s(known.samples, known.update_s)
    return known if allowed_s <= MUCH_LONGER * known.allowed_s else None


def _place(job: PlanJob) -> Path | None:
    return place_of(job.config, job.choices, job.dared, job.cores.usable)


def _dared(config: TrainConfig, fixed: Collection[str]) -> tuple[str, ...]:
    """Return the precisions to try if none was given: bf16, if the processor has units for it."""
    flags = processor_flags()
    fast = config.device != "cpu" or not flags or BF16_UNITS & flags
    return ("bf16",) if fast and "precision" not in fixed and config.precision == "fp32" else ()


def _refuse_elsewhere(config: TrainConfig, budget_s: float) -> None:
    """Refuse a run on other hosts: a plan is for the ranks of one host."""
    refuse_launcher("a plan")
    if config.hosts is not None or config.servers:
        name = "--servers" if config.hosts is None else "--hosts"
        raise BadOption(f"a plan is for the ranks of this machine; leave {name} out")
    if config.parallel is not None:
        raise BadOption("a plan is for ranks that each hold the whole model; leave --parallel out")
    if not budget_s > 0:
        raise BadOption(f"--budget is {budget_s:g}; give seconds above 0, such as {BUDGET_S:g}")
