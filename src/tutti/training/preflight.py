"""Checks before the first step that model, data, loss and metrics fit each other."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tutti.data.batches import Batches
from tutti.data.columns import LENGTHS, MASK, Columns, Inputs, names_beside
from tutti.data.parts import Part
from tutti.errors import BadModel, BadOption, TuttiError
from tutti.records.shapes import described
from tutti.training.evaluation import Objective, evaluating, undone
from tutti.training.losses import LossBatch, check_labels, fit_check, known
from tutti.training.metrics import fitted
from tutti.training.precision import CONTIGUOUS, FP32, Arithmetic
from tutti.training.reading import labelled

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

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
    some = torch.arange(min(arithmetic.telling_samples, len(part)))

    def taken(indices: Tensor) -> tuple[Inputs, Tensor]:
        inputs, targets = part.take(indices)
        return arithmetic.inputs(inputs), arithmetic.targets(targets)

    inputs, targets = taken(some)
    refuse_unknown_inputs(module, part, inputs)
    with evaluating(module), torch.no_grad():
        with _naming("the model", inputs, arithmetic.layout):
            whole = arithmetic.call(module, inputs)
        outputs = arithmetic.output(whole)
        if loss.labels and not part.targets.is_floating_point() and outputs.dim() > 1:
            check_labels(part.targets, outputs.shape[1], loss.ignored)
        loss = fit_check(outputs, targets, loss, objective.classes)
        if loss.whole:
            with _naming(f"loss '{loss.name}'", inputs):
                found = loss.function(whole, LossBatch(inputs, targets))
                loss = known(
                    loss, found, lambda: objective.compute(module, *taken(torch.cat([some, some])))[1]
                )
        seen, its = labelled(outputs, targets, loss.ignored)
        every = _some_targets(part, MOST // max(1, seen[:1].numel()), loss.ignored)
        metrics = []
        for metric in objective.metrics:
            with _naming(f"metric '{metric.name}'", outputs):
                metrics.append(fitted(metric, seen, its, every))
    return replace(objective, loss=loss, metrics=tuple(metrics))


def try_gradient(module: nn.Module, part: Part, objective: Objective) -> None:
    """Compute the gradient of a few samples, and throw it away, leaving the model as it was.

    Args:
        module: the model, in training mode.
        part: the samples that it is to learn.
        objective: the loss, and how the model computes.

    Raises:
        BadModel: it cannot be computed.
    """
    arithmetic, function = objective.arithmetic, objective.loss.function
    inputs, targets = part.take(torch.arange(min(arithmetic.telling_samples, len(part))))
    inputs, targets = arithmetic.inputs(inputs), arithmetic.targets(targets)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    modules = [module, function] if isinstance(function, nn.Module) else [module]
    with undone(modules), _naming("the model's training step", inputs, arithmetic.layout):
        loss = objective.compute(module, inputs, targets)[1]
        torch.autograd.grad(loss, parameters, allow_unused=True)


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
def _naming(what: str, inputs: Inputs, layout: str = CONTIGUOUS) -> Iterator[None]:
    """Turn an error about shapes or types into one that names the receiver, its input and the line."""
    try:
        yield
    except TuttiError:
        raise  # of the ranks, or of a model that is not as it must be: it names what is wrong itself
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise BadModel(
            f"{what} cannot take a batch of {_said(inputs)}: {type(error).__name__}: {error}{_place(error)}; "
            f"change {what}, or the data, so that they fit"
            + (
                f", or leave --layout {layout} out, in which images have other strides"
                * (layout != CONTIGUOUS)
            )
        ) from error


def refuse_unknown_inputs(module: nn.Module, part: Part, inputs: Inputs) -> None:
    """Refuse several inputs, or sequences, for a model whose `forward` does not take them.

    Args:
        module: the model.
        part: has the samples.
        inputs: of some of them, as the model gets them.

    Raises:
        BadModel: it does not; with what it takes.
    """
    if isinstance(inputs, Tensor):
        return
    signature = _signature(module)
    try:
        signature.bind(**inputs) if isinstance(inputs, dict) else signature.bind(*inputs)
        _refuse_misplaced_lengths(signature, part)
    except TypeError as error:
        raise BadModel(
            f"the data give each sample the inputs {described(part.shape)}{_of_sequences(part)}, and the "
            f"model's forward is {type(module).__name__}.forward{signature}: {error}; "
            + (
                "it gets them as keywords, so give it parameters of their names"
                if isinstance(inputs, dict)
                else "it gets them in this order, so give it as many parameters"
                + ("; the built-in gru, transformer and jets take sequences" if _of_sequences(part) else "")
            )
        ) from error


def told_of_sequences(part: Part, module: nn.Module) -> Part:
    """Return a part whose sequences come with what a model takes beside them: their lengths, or a mask.

    A model with a parameter `attention_mask`, as those of Hugging Face, gets one, unless the data have it.
    """
    stored = part.stored_inputs
    if not isinstance(stored, Columns) or not (names := names_beside(replace(stored, beside=LENGTHS))):
        return part
    known = [*_signature(module).parameters]
    beside = LENGTHS
    if stored.names:
        if MASK in known and not set(names) & set(known):
            beside = "" if MASK in stored.names else MASK
    elif known[len(stored.columns) :][:1] == [MASK]:
        beside = MASK
    return replace(part, stored_inputs=replace(stored, beside=beside))


def _signature(module: nn.Module) -> inspect.Signature:
    return inspect.signature(module.forward if type(module).__call__ is nn.Module.__call__ else module)


def _refuse_misplaced_lengths(signature: inspect.Signature, part: Part) -> None:
    """Refuse lengths of sequences that an optional parameter for something else would get.

    Raises:
        TypeError: it would.
    """
    stored = part.stored_inputs
    if not isinstance(stored, Columns) or stored.names or stored.beside != LENGTHS:
        return
    positional = [one for one in signature.parameters.values() if one.kind in _POSITIONAL]
    first = len(stored.columns)
    for one in positional[first : first + len(names_beside(stored))]:
        if one.default is not inspect.Parameter.empty and "len" not in one.name.lower():
            raise TypeError(f"its parameter '{one.name}' would get lengths of sequences")


def _of_sequences(part: Part) -> str:
    """Say which further inputs a model gets, where some are sequences of unequal length."""
    stored = part.stored_inputs
    if not isinstance(stored, Columns) or not (names := names_beside(stored)):
        return ""
    said = " and ".join(f"'{name}'" for name in names if name)
    return f", sequences of unequal length, with {said or 'their lengths after them'}"


def _said(inputs: Inputs) -> str:
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)} ({str(inputs.dtype).removeprefix('torch.')})"
    if isinstance(inputs, dict):
        return ", ".join(f"'{name}' of {_said(one)}" for name, one in inputs.items())
    return ", ".join(map(_said, inputs))


def _place(error: Exception) -> str:
    """Name the innermost line of code that is neither torch's nor the training's."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" (at {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
