"""Whether forward and backward are recorded as a CUDA graph."""

from __future__ import annotations

from tutti.data import Batches, Queue
from tutti.errors import BadOption
from tutti.experiments.config import TrainConfig
from tutti.experiments.task import Task
from tutti.replica import Replica
from tutti.training.captured import Captured, Cuda, can_be_recorded


def captured_by(
    config: TrainConfig, task: Task, replica: Replica, batches: Batches | Queue
) -> Captured | None:
    """What computes by a graph; None where the CPU is to tell the device each operation.

    Raises:
        BadOption: a graph is asked for where none can be.
    """
    wanted, on_gpu = config.cuda_graph, batches.part.device.type == "cuda"
    if wanted == "on" and not (on_gpu and isinstance(batches, Batches)):
        raise BadOption(
            "--cuda-graph on is for samples that lie on a GPU; use --device cuda, a data set that takes at "
            "most half of its memory, and no --balance queue; or leave --cuda-graph at auto"
        )
    if not on_gpu or not isinstance(batches, Batches) or wanted == "off":
        return None
    if task.loss.weighed:
        if wanted == "on":
            raise BadOption(
                f"loss '{task.loss.name}' has a denominator of its own, which the CPU must know in each "
                "step; use --cuda-graph off"
            )
        return None
    if wanted == "auto" and not can_be_recorded(replica.module, task.loss):
        return None
    return Captured(replica, batches, task.loss, task.arithmetic, bool(task.metrics), Cuda())
