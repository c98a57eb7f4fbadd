"""The check that a layout changes a model's outputs by rounding alone, before it is chosen for its speed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from tutti.data import Part
from tutti.errors import BadModel
from tutti.training.evaluation import evaluating
from tutti.training.precision import CONTIGUOUS, Arithmetic

MOST: Final = 0.01
"""The share of the outputs that rounding may change. It is 1e-7 of each product, and no layout may be chosen
freely for a model that makes so much of that. One that looks at the strides of images changes them all."""


def refuse_other_outputs(module: nn.Module, part: Part, arithmetic: Arithmetic) -> None:
    """Refuse a layout in which a model gives other outputs for a few samples, in evaluation mode.

    Args:
        module: the model, not prepared; it stays as it is.
        part: has the samples.
        arithmetic: with the layout; a precision below fp32 is not looked at.

    Raises:
        BadModel: it does.
    """
    if arithmetic.layout == CONTIGUOUS:
        return
    inputs, _ = part.take(torch.arange(min(arithmetic.telling_samples, len(part))))
    here = replace(arithmetic, precision="fp64" if arithmetic.precision == "fp64" else "fp32")
    found = []
    for way in (replace(here, layout=CONTIGUOUS), here):
        model = way.prepare(copy.deepcopy(module))
        with evaluating(model), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(way.forward(model, way.inputs(inputs)).double())
    plain, other = found
    if not bool((plain - other).norm() <= MOST * plain.norm()):  # NaN is not, either.
        raise BadModel(f"the model's outputs in the layout {here.layout} are not those of {CONTIGUOUS}")
