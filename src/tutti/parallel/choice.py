"""From a layout to a rank's portion of the model."""

from __future__ import annotations

from torch import nn

from tutti.comm.base import Communicator
from tutti.data.parts import Part
from tutti.errors import BadOption
from tutti.parallel.base import Portion, Ranks, Whole
from tutti.parallel.layout import Layout
from tutti.parallel.tensor import TensorPortion
from tutti.strategies.base import Pace, Strategy
from tutti.training.arithmetic import Arithmetic
from tutti.training.losses import Loss


def check_together(strategy: Strategy) -> None:
    """Refuse a strategy that cannot move portions of a model.

    Raises:
        BadOption: its workers do not make every update together.
    """
    if strategy.pace is not Pace.TOGETHER:
        raise BadOption(
            "--parallel needs a strategy whose workers make each update together, and those of "
            f"'{strategy.name}' do not; leave --strategy out, or use sync"
        )


def portion_of(
    layout: Layout | None,
    comm: Communicator,
    module: nn.Module,
    samples: Part,
    loss: Loss,
    arithmetic: Arithmetic,
) -> Portion:
    """Make this rank's portion of a model (collective).

    Args:
        layout: who holds what; None: each rank the whole.
        comm: all ranks that train.
        module: the model, alike on all ranks and prepared by `arithmetic`. It becomes the portion.
        samples: what it is to learn.
        loss: the loss of the run.
        arithmetic: how the model computes.

    Raises:
        BadModel: the model cannot be divided like that; the message names the layer.
        BadOption: an option does not fit the model.
    """
    if layout is None:
        return Whole(module, comm)
    return TensorPortion(module, Ranks.of(layout, comm))
