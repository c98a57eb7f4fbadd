"""Whether the steps of a run are computed by a CUDA graph."""

from __future__ import annotations

from tutti.data import Batches, Queue
from tutti.data.columns import Columns
from tutti.errors import BadOption
from tutti.replica import Replica
from tutti.run.config import NEEDS_GPU_SAMPLES, TrainConfig
from tutti.training.cuda_graph import CudaRecorder, GraphedPass, can_be_recorded
from tutti.training.evaluation import Objective


def captured_by(
    config: TrainConfig, objective: Objective, replica: Replica, batches: Batches
) -> GraphedPass | None:
    """Return what computes by a graph; None where the CPU launches each operation.

    Raises:
        BadOption: a graph is asked for where none can be.
    """
    wanted, on_gpu = config.cuda_graph, batches.part.device.type == "cuda"
    if wanted == "on" and (not on_gpu or isinstance(batches, Queue)):
        raise BadOption(NEEDS_GPU_SAMPLES)
    if not on_gpu or isinstance(batches, Queue) or wanted == "off" or batches.augment is not None:
        return None
    if config.precision == "fp16":
        return None
    if objective.loss.weighed:
        if wanted == "on":
            raise BadOption(
                f"loss '{objective.loss.name}' has a denominator of its own, which the CPU must know in each "
                "step; use --cuda-graph off"
            )
        return None
    if isinstance(batches.part.stored_inputs, Columns) or objective.loss.whole:
        if wanted == "on":
            raise BadOption(
                "a graph computes one output of one input; use --cuda-graph off for several inputs, for "
                "sequences, and for losses that get all outputs"
            )
        return None
    if wanted == "auto" and not can_be_recorded(replica.module, objective.loss):
        return None
    return GraphedPass(replica, batches, objective, CudaRecorder())
