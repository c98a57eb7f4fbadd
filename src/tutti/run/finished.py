"""A run that has come to its end, told again from its folder. Needs no torch."""

from __future__ import annotations

from tutti.launch.launcher import started_by
from tutti.records.run import Summary
from tutti.records.run_folder import RunFolder, StrategyFacts, TrainedOn
from tutti.run import summary_lines
from tutti.run.config import TrainConfig
from tutti.run.resume import Resume
from tutti.run.train_job import RunOutcome


def outcome_again(resume: Resume, config: TrainConfig, quiet: bool = False) -> RunOutcome | None:
    """Return the outcome of a run that was to go on, but has come to its end; say so.

    Returns:
        The outcome, without the weights; None: there is something left to be trained.
    """
    folder = RunFolder(resume.folder)
    if resume.checkpoint is not None or not folder.finished:
        return None
    before = TrainConfig.from_json(folder.config())
    lengths = [(one.epochs, one.steps, one.monitor, one.patience, one.target) for one in (before, config)]
    if lengths[0] != lengths[1]:
        return None
    summary, data = folder.read(Summary), folder.read(TrainedOn)
    if not quiet and started_by().rank == 0:
        print(f"the run in {resume.folder} has come to its end; give more epochs to train on")
        print(*summary_lines.result(summary, data.labels), f"run folder: {folder.path}", sep="\n", flush=True)
    return RunOutcome(
        config=before,
        history=folder.history().records,
        summary=summary,
        strategy=folder.read(StrategyFacts),
        folder=str(folder.path),
        shape=data.of_inputs,
        outputs=data.classes or data.outputs,
        weights=None,
    )
