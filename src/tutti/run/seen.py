"""Other data, seen by a model as it saw those that it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tutti.data.columns import Columns, columns_of, sequences_in
from tutti.data.parts import DataSet, Part, Scale
from tutti.errors import BadData
from tutti.records.run_folder import TrainedOn
from tutti.run.train_job import PARTS


def scale_seen(trained: TrainedOn) -> Scale:
    """Return the scale of the inputs that a model was trained on."""
    each = tuple(Scale(one.mean, one.std, one.fill) for one in trained.inputs)
    return Scale(trained.mean, trained.std, trained.fill, each)


def part_named(dataset: DataSet, name: str) -> Part:
    """Return the part of a data set that is called "train", "validation" or "test"."""
    part: Part | None = getattr(dataset, name)
    if part is None:
        have = ", ".join(one for one in PARTS if getattr(dataset, one) is not None)
        raise BadData(f"{dataset.name} has no {name} part; it has: {have}. Choose one with --part")
    return part


def aligned(name: str, part: Part, columns: Sequence[str], trained: TrainedOn) -> Part:
    """Return a part of other data with its several inputs in the order of training.

    Args:
        name: of the data, for messages.
        part: of them.
        columns: the names of the columns of a table; empty: it has none, or the user has chosen them.
        trained: what the model was trained on.

    Raises:
        BadData: inputs are missing, or are of another shape or another kind of numbers.
    """
    there = trained.columns
    if columns and there and not there[0].isdecimal() and tuple(columns) != tuple(there):
        raise BadData(
            f"{name} has the inputs {', '.join(columns[:10])}, but the model was trained on "
            f"{', '.join(there[:10])}; give these, in this order"
        )
    if trained.inputs:
        part = _in_columns(trained, part)
    stored = part.stored_inputs
    known = trained.dtype or ("uint8" if trained.mean else "")
    here = "" if isinstance(stored, Columns) else str(stored.dtype).removeprefix("torch.")
    if here and known and _kind(here) != _kind(known):
        hint = ", from 0 to 255" if known == "uint8" else ""
        raise BadData(
            f"the inputs of {name} are {here}, but the model was trained on {known}{hint} ({trained.name}); "
            f"convert them, as by array.astype('{known}')"
        )
    if part.shape != trained.of_inputs:
        raise BadData(
            f"the inputs of {name} have shape {part.shape}, but the model was trained on {trained.of_inputs} "
            f"({trained.name}); give data of that shape"
        )
    return part


def _kind(dtype: str) -> str:
    return "float" if dtype.startswith(("float", "bfloat")) else dtype


def _in_columns(trained: TrainedOn, part: Part) -> Part:
    """Put the inputs that a model takes in its order, and sequences as long as those it knows."""
    stored, names = part.stored_inputs, tuple(one.name for one in trained.inputs if one.name)
    columns = columns_of(stored)
    there = stored.names if isinstance(stored, Columns) else ()
    # Of named inputs there may be more than the model takes.
    if not {*names} <= {*there} or (not names and len(columns) != len(trained.inputs)):
        return part
    ordered = [columns[there.index(name)] for name in names] if names else columns
    found = (
        replace(column if column.values is not None else sequences_in(column), longest=one.shape[0])
        if one.sequence
        else column
        for one, column in zip(trained.inputs, ordered, strict=True)
    )
    return replace(part, stored_inputs=Columns(tuple(found), names))
