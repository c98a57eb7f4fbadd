"""The fastest way to run a training on this machine, found by measuring. Needs no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from typing_extensions import override

from tutti.errors import BadOption
from tutti.launch.cores import Cores, allowed_cores
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement
from tutti.records.run_folder import check_writable
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.start import announce, run
from tutti.studies.autotune.candidates import Choices, choices_for
from tutti.studies.autotune.recommendation import Recommendation

BUDGET_S: Final = 50.0
"""Seconds that a plan may take, when nothing is said."""

BUSY: Final = 0.25
"""The share of the cores from which on it is worth a warning that others use them."""

LEAST: Final = 0.5
"""The share of the time that is for measuring, however long it takes to start the ranks and read the data."""


@dataclass(frozen=True)
class PlanJob(Job):
    """Measurements of the ways in which a training could be run.

    Attributes:
        choices: what may be chosen.
        dared: precisions that round more, which are picked if they are faster and their loss follows.
        cores: of this host, that the ranks share.
        deadline: when the measurements are to end, by the clock of the host's communicators.
        least_s: seconds that they get at least, however late they begin.
        exhaustive: measure all ways until then, however slow they seem.
    """

    entry: ClassVar[str] = "tutti.studies.autotune.measure:work"
    announced: ClassVar[bool] = False

    choices: Choices
    dared: tuple[str, ...]
    cores: Cores
    deadline: float
    least_s: float = 0.0
    exhaustive: bool = False

    @override
    def placement(self) -> Placement:
        # Ranks are not bound to cores from the start: each of them takes part in ways with other cores.
        return Placement(max(ranks for ranks, _ in self.choices.shapes), 1)


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
    """Measure the ways in which a training can be run on this machine.

    Args:
        config: what to train.
        fixed: the fields of `config` that are decided: of workers, threads, precision, layout, batch_size.
        budget_s: seconds that this may take, and a step longer. If more than half of them are gone before
            the ranks are ready, measuring takes half of them all the same.
        precisions: that may be chosen for their speed alone; by default that of `config`, or bf16 if it is
            faster and its loss follows.
        batch_sizes: that may be chosen; by default that of `config`, as another one trains differently.
        exhaustive: measure all ways until the budget is used up, instead of stopping the slow ones early.
        quiet: print only what is measured for how long, and warnings.

    Returns:
        What was measured, and what to take.

    Raises:
        BadOption: the options contradict each other or the launcher, or leave nothing to choose from.
        UserError: the input is wrong.
        TuttiError: a rank failed.
    """
    began = time.monotonic()
    _refuse_elsewhere(config, budget_s)
    cores = allowed_cores()
    choices = choices_for(config, fixed, cores.usable, precisions, batch_sizes)
    warning = others_at_work(cores.usable)
    if warning is not None:
        announce(f"warning: {warning}")
    announce(f"measuring for at most {budget_s:g} s once the ranks have started")
    open_to_others = not precisions and "precision" not in fixed and config.precision == "fp32"
    dared = ("bf16",) if open_to_others else ()
    job = PlanJob(
        config,
        choices,
        dared,
        cores,
        deadline=began + budget_s,
        least_s=LEAST * budget_s,
        exhaustive=exhaustive,
        quiet=quiet,
    )
    found = run(job)
    assert isinstance(found, Recommendation)
    return replace(found, seconds=time.monotonic() - began)


def planned(config: TrainConfig, fixed: Collection[str], budget_s: float) -> TrainConfig:
    """Return the configuration with the pick of a short measurement; print the pick and the reason.

    Args:
        config: what to train.
        fixed: the fields of it that are decided.
        budget_s: seconds that this may take.

    Raises:
        BadRunFolder: the training could not write its folder.
        TuttiError: as `plan` does.
    """
    if config.out is not None:
        check_writable(config.out)  # before time goes into the measurement
    found = plan(config, fixed, budget_s=budget_s, quiet=True)
    for line in found.in_short():
        announce(line)
    return found.pick.candidate.applied_to(config)


def others_at_work(cores: int) -> str | None:
    """A warning that other programs seem to use the cores; nothing where they hardly do."""
    load = os.getloadavg()[0]
    if load < BUSY * cores:
        return None
    return (
        f"in the last minute {load:.1f} threads were busy on {cores} core{'s' if cores > 1 else ''}; if "
        "other programs still compute, plan again without them: what is fastest now may not be so then"
    )


def _refuse_elsewhere(config: TrainConfig, budget_s: float) -> None:
    """A plan is for the ranks of one host, which it starts itself."""
    around = started_by()
    if around.launcher is not Launcher.ALONE:
        raise BadOption(
            f"a plan starts its ranks itself, in several numbers; run it without {around.launcher.value}"
        )
    if config.hosts is not None or config.servers:
        name = "--servers" if config.hosts is None else "--hosts"
        raise BadOption(f"a plan is for the ranks of this machine; leave {name} out")
    if config.parallel is not None:
        raise BadOption("a plan is for ranks that hold the whole model each; leave --parallel out")
    if not budget_s > 0:
        raise BadOption(f"--budget is {budget_s:g}; give seconds above 0, such as {BUDGET_S:g}")
