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
from torch.nn.parameter import is_lazy

from tutti.data.batches import Batches
from tutti.data.columns import LENGTHS, MASK, Columns, Inputs, names_beside
from tutti.data.parts import Part
from tutti.errors import BadModel, BadOption, TuttiError
from tutti.training.augmentations import described
from tutti.training.evaluation import Objective, evaluating, undone
from tutti.training.losses import LossBatch, check_labels
from tutti.training.metrics import fitted
from tutti.training.precision import CONTIGUOUS, FP32, Arithmetic
from tutti.training.targets import labelled

MOST = 10_000_000
"""The most numbers of outputs on which a metric is tried."""


def check_fit(
    module: nn.Module, part: Part, objective: Objective, together: bool = False, by_value: bool = False
) -> Objective:
    """Run a few samples through model, loss and metrics, in evaluation mode; the model stays as it was.

    With `together` several workers make one update; with `by_value` classes are numbered in the order of
    labels such as 3, 5 and 7. The returned objective's loss knows whether it has its own denominator.
    BadModel, BadOption or BadData name the part that does not fit.
    """
    loss, arithmetic = objective.loss, objective.arithmetic
    inputs, targets = part.take(torch.arange(min(arithmetic.telling_samples, len(part))))
    inputs, targets = arithmetic.inputs(inputs), arithmetic.targets(targets)
    with evaluating(module), torch.no_grad():
        with _naming("the model", inputs, arithmetic.layout), _unwritten(module, together):
            whole = arithmetic.call(module, inputs)
        outputs = loss.in_units(arithmetic.output(whole))
        if outputs.dim() == 0 or len(outputs) != len(targets):
            raise BadModel(
                f"the model's outputs have shape {tuple(outputs.shape)} for {len(targets)} samples; they "
                "need one row for each"
            )
        if loss.labels and not part.targets.is_floating_point() and outputs.dim() > 1:
            check_labels(part.targets, outputs.shape[1], loss.ignored)
        several = not targets.is_floating_point() and outputs.dim() > targets.dim() and outputs.shape[1] > 1
        if by_value and several and outputs.shape[1] != objective.classes:
            raise BadModel(
                f"the model has {outputs.shape[1]} outputs, but the labels have {objective.classes} values, "
                f"not from 0 on; give --data.classes {outputs.shape[1]} if they are the numbers of outputs, "
                "or a model with an output for each value"
            )
        with _naming(f"loss '{loss.name}' for targets of shape {tuple(targets.shape)}", outputs):
            # A copy, as a function may change its arguments in place.
            first, second = (whole, LossBatch(inputs, targets)) if loss.whole else (outputs.clone(), targets)
            ones = torch.ones(len(targets), dtype=torch.float64) if objective.weighted else None
            found = loss.called(first, second) if ones is None else loss.measure(first, second, ones)
        if not isinstance(found[0] if isinstance(found, tuple) else found, Tensor):
            raise BadOption(
                f"loss '{loss.name}' gives a {type(found).__name__}; give a tensor: the mean over the "
                "samples, one value for each, or (the sum of the losses, the weight to divide it by)"
            )
        seen, its = labelled(loss.ignored, outputs, targets)
        evenly = part.targets[:: max(1, len(part) * seen[:1].numel() // MOST)]
        every = labelled(loss.ignored, evenly.unsqueeze(1), evenly)[1]
        metrics = []
        for metric in objective.metrics:
            with _naming(f"metric '{metric.name}'", outputs):
                metrics.append(fitted(metric, seen, its, every, objective.weighted))
    one_hot = several and (loss.flags or loss.amounts)
    loss = replace(loss, weighed=isinstance(found, tuple), one_hot=one_hot)
    return replace(objective, loss=loss, metrics=tuple(metrics))


def try_gradient(module: nn.Module, part: Part, objective: Objective) -> None:
    """Raise BadModel if the gradient of a few samples cannot be computed; the model stays as it was."""
    arithmetic, function = objective.arithmetic, objective.loss.function
    inputs, targets = part.take(torch.arange(min(arithmetic.telling_samples, len(part))))
    inputs, targets = arithmetic.inputs(inputs), arithmetic.targets(targets)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    modules = [module, function] if isinstance(function, nn.Module) else [module]
    with undone(modules), _naming("the model's training step", inputs, arithmetic.layout):
        loss = objective.compute(module, inputs, targets).loss
        torch.autograd.grad(loss, parameters, allow_unused=True)


def check_smallest_batch(
    module: nn.Module, batches: Batches, whole: bool = False, arithmetic: Arithmetic = FP32
) -> None:
    """Raise BadOption if BatchNorm would get a single sample of an update: a rank's, or the `whole`."""
    if (batches.fewest_together if whole else batches.fewest) > 1:
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
def _unwritten(module: nn.Module, together: bool) -> Iterator[None]:
    """Refuse a forward pass that replaces a weight, or, where workers train together, writes one."""
    trained = {
        name: one
        for name, one in module.named_parameters()
        if one.requires_grad and not is_lazy(one) and type(one.data) is Tensor
    }
    before = {name: (one.data_ptr(), one._version) for name, one in trained.items()}
    yield
    for name, one in trained.items():
        place, version = before[name]
        if one.data_ptr() != place or (together and one._version != version):
            raise BadModel(
                f"the model's forward writes its weight '{name}', which the optimizer updates; every worker "
                "would do so again. Compute with a changed copy, as torch.nn.utils.parametrize does (also in "
                "place of max_norm of an embedding)"
            )


@contextmanager
def _naming(what: str, inputs: Inputs, layout: str = CONTIGUOUS) -> Iterator[None]:
    """Turn an error about shapes or types into one that names the part, its input and the line."""
    try:
        yield
    except TuttiError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        without = f", or leave --layout {layout} out, in which images have other strides"
        remedy = f"change {what}, or the data, so that they fit{'' if layout == CONTIGUOUS else without}"
        raise BadModel(
            f"{what} cannot take a batch of shape {described(inputs)}: {type(error).__name__}: {error}"
            f"{_place(error)}; {remedy}"
        ) from error


def told_of_sequences(part: Part, module: nn.Module) -> Part:
    """Return a part whose sequences come with their lengths, or with a mask for a Hugging Face model."""
    stored = part.stored_inputs
    if not isinstance(stored, Columns) or not (names := names_beside(replace(stored, beside=LENGTHS))):
        return part
    forward = module.forward if type(module).__call__ is nn.Module.__call__ else module
    known = [*inspect.signature(forward).parameters]
    beside = LENGTHS
    if stored.names:
        if MASK in known and not set(names) & set(known):
            beside = "" if MASK in stored.names else MASK
    elif known[len(stored.columns) :][:1] == [MASK]:
        beside = MASK
    return replace(part, stored_inputs=replace(stored, beside=beside))


def _place(error: Exception) -> str:
    """Name the innermost line of code that is neither in torch nor here."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" (at {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
