"""Checks before the first step that model, data, loss and metrics fit each other."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import BadModel, BadOption, TuttiError
from tutti.training.evaluation import Objective, evaluating, undone
from tutti.training.losses import check_labels, fit_check
from tutti.training.metrics import fitted
from tutti.training.precision import FP32, Arithmetic
from tutti.training.reading import labelled

PROBE_SAMPLES = 2

MOST = 10_000_000
"""The most numbers of outputs on which a metric is tried."""


def check_fit(module: nn.Module, part: Part, objective: Objective) -> Objective:
    """Run a few samples through model, loss and metrics, in evaluation mode, leaving the model as it was.

    Args:
        module: the model.
        part: the samples that it is to learn.
        objective: loss and metrics of the run, and the classes of the data set.

    Returns:
        The objective, whose loss knows now whether it has a denominator of its own.

    Raises:
        BadModel: the model does not take these inputs, or its outputs do not fit the loss or a metric.
        BadOption: the loss is neither a mean over the samples nor a sum with its weight.
        BadData: a label lies outside 0..outputs-1.
    """
    loss, arithmetic = objective.loss, objective.arithmetic
    inputs, targets = part.take(torch.arange(min(PROBE_SAMPLES, len(part))))
    inputs, targets = arithmetic.inputs(inputs), arithmetic.targets(targets)
    with evaluating(module), torch.no_grad():
        with _naming("the model", inputs):
            outputs = arithmetic.forward(module, inputs)
        if loss.labels and not part.targets.is_floating_point() and outputs.dim() > 1:
            check_labels(part.targets, outputs.shape[1], loss.ignored)
        loss = fit_check(outputs, targets, loss, objective.classes)
        seen, its = labelled(outputs, targets, loss.ignored)
        every = _some_targets(part, MOST // max(1, seen[:1].numel()), loss.ignored)
        metrics = []
        for metric in objective.metrics:
            with _naming(f"metric '{metric.name}'", outputs):
                metrics.append(fitted(metric, seen, its, every))
    return replace(objective, loss=loss, metrics=tuple(metrics))


def _some_targets(part: Part, count: int, ignored: int | None) -> Tensor:
    """Return the targets of all samples, or of about `count` evenly spaced ones; none without a label."""
    targets = part.targets[:: max(1, len(part) // max(1, count))]
    return labelled(targets.unsqueeze(1), targets, ignored)[1]


def check_smallest_batch(module: nn.Module, batches: Batches, *, arithmetic: Arithmetic = FP32) -> None:
    """Refuse batches that leave a rank one sample of an update where the model needs more, as BatchNorm may.

    Random numbers and buffers are as before afterwards.

    Args:
        module: the model, prepared by `arithmetic`.
        batches: of any rank.
        arithmetic: how the model computes.

    Raises:
        BadOption: the model cannot train on a single sample, and has to.
    """
    if batches.fewest > 1:
        return
    inputs = arithmetic.inputs(batches.part.take(torch.arange(1))[0])
    try:
        with undone([module]), torch.no_grad():
            arithmetic.forward(module, inputs)
    except ValueError as error:
        raise BadOption(
            f"{len(batches.part)} samples in batches of {batches.batch_size} leave some rank a single one in "
            f"the last update of an epoch, and the model cannot train on that ({error}); "
            f"choose another --batch-size, or fewer workers"
        ) from error


@contextmanager
def _naming(what: str, inputs: Tensor) -> Iterator[None]:
    """Turn an error about shapes or types into one that names the receiver, its input and the line."""
    try:
        yield
    except TuttiError:
        raise  # of the ranks, or of a model that is not as it must be: it names what is wrong itself
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shape, kind = tuple(inputs.shape), str(inputs.dtype).removeprefix("torch.")
        raise BadModel(
            f"{what} cannot take a batch of shape {shape} ({kind}): "
            f"{type(error).__name__}: {error}{_place(error)}"
        ) from error


def _place(error: Exception) -> str:
    """Name the innermost line of code that is neither torch's nor the training's."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" (at {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
