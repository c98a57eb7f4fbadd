"""`--validate background`: processes beside the ranks evaluate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator, cut
from tutti.records.json_lines import to_json
from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.state import State, Values
from tutti.training.background import BackgroundEvaluator
from tutti.training.evaluation import Sums, Tally, evaluate
from tutti.training.snapshots import SnapshotLayout
from tutti.training.validation import Validation, ValidationTask


@part("background")
class Background(Validation):
    """A process beside each rank evaluates its share of a snapshot, on time that training leaves.

    What is left at the end the ranks evaluate themselves.
    """

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        mine = cut(len(task.part), task.comm.size)[task.comm.rank]
        alone = cast("Communicator", SimpleNamespace(rank=0, size=1))
        evaluation = partial(evaluate, task.replica.module, task.part.stretch(mine), alone, task.objective)
        self._evaluator = BackgroundEvaluator(task.replica, evaluation)

    @override
    def begin(self) -> None:
        self._evaluator.snapshot()

    @override
    def collect(self, everything: bool) -> list[Evaluation]:
        """The results that are ready on all ranks; or all."""
        task, evaluator = self._task, self._evaluator
        if everything:
            evaluator.finish()
        ready = min(cast("list[int]", task.comm.all_gather_objects(evaluator.poll())))
        tally = Tally(task.objective)
        found = [tally.total_of(evaluator.take(), task.comm) for _ in range(ready)]
        return [*self._collect_found(), *found]

    @override
    def state(self) -> State:
        """Return results where all ranks have theirs, and else the weights that are to be evaluated."""
        comm, tally, state = self._task.comm, Tally(self._task.objective), super().state()
        waiting = self._evaluator.waiting()
        done = {number for number, one in waiting.items() if isinstance(one, Sums)}
        everywhere = cast("list[set[int]]", comm.all_gather_objects(done))
        for number, one in waiting.items():
            late = next((rank for rank, found in enumerate(everywhere) if number not in found), None)
            if late is None:
                found = cast("Sums", one)
                copied = replace(found, counts=found.counts.clone(), sums=found.sums.clone())
                kept: object = to_json(tally.total_of(copied, comm))
            else:
                kept = self._kept(late, one)
            state.shared["waiting"].append(kept)
        return state

    def _kept(self, late: int, one: Sums | list[Tensor]) -> Values:
        """Return a snapshot, on rank 0 at least, which is given it by a rank that still has it."""
        layout, comm = SnapshotLayout(self._task.replica), self._task.comm
        if isinstance(one, Sums):
            one = [torch.empty_like(tensor) for tensor in layout.present]
        for tensor in one if late else []:
            if comm.rank == late:
                comm.send(tensor.view(-1), 0)
            elif comm.rank == 0:
                comm.recv(tensor.view(-1), late)
        return layout.named(one)

    @override
    def close(self) -> None:
        self._evaluator.close()
