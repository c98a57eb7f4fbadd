"""Arrays from a source, brought into one form and checked before anything is shared."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.columns import Column
from tutti.data.rows import Array, Indices, Rows, StoredRows, chosen, joined
from tutti.errors import BadData, NotFinite

MISSING: Final = ("auto", "error", "drop", "mean")
"""Consequence of a missing value, which is NaN: "auto" prepares tables for it; for others it is an error."""

CHUNK = 1 << 22
"""Whole arrays are read in pieces of about this many values, which stay in the processor's cache."""

_CHANNELS = (1, 3, 4)
"""Grey, colour, and colour with transparency."""


def part_columns(
    part: str,
    inputs: Sequence[tuple[str, object]],
    targets: object,
    missing: str = "error",
    columns: tuple[str, ...] = (),
    finite: bool = True,
) -> tuple[tuple[Column[Rows], ...], Array, Indices]:
    """Return the inputs, the targets, and the numbers of the kept samples.

    Images become (samples, channels, height, width): 8-bit arrays of three dimensions get a channel, and
    NumPy arrays of four dimensions whose channels come last are transposed. Tensors keep their order. Each
    input comes with its name in messages; without `finite` none is read, and NaN and inf are not checked.
    Missing targets become 0.
    """
    found = [input_column(part, what, one) for what, one in inputs]
    if targets is None:
        targets = np.zeros(len(found[0].rows), np.float32)
    y = targets[:] if isinstance(targets, StoredRows) else as_array(targets, f"{part} targets")
    for (what, _), column in zip(inputs, found, strict=True):
        if y.ndim == 0 or len(column.rows) != len(y):
            raise BadData(
                f"the {part} part has {len(column.rows):,} {what.removeprefix(part).strip()} but "
                f"{y.size:,} targets; give one target for each input"
            )
    kept = np.arange(len(y))
    if not finite:
        return tuple(found), y, kept
    looks = [not_finite(values_of(column)) for column in found]
    if missing == "drop":
        incomplete = [_of_samples(column, nan) for column, (nan, _) in zip(found, looks, strict=True)]
        kept = np.flatnonzero(~np.logical_or.reduce([not_finite(y)[0], *incomplete]))
        if len(kept) < len(y):
            print(
                f"{len(y) - len(kept):,} of {len(y):,} {part} samples have missing values and are left out",
                file=sys.stderr,
            )
        if not len(kept):
            raise BadData(f"every {part} sample has a missing value; --data.missing mean keeps them")
    for (what, _), column, (nan, infinite) in zip(inputs, found, looks, strict=True):
        if column.values is None:
            bad = infinite & np.isin(np.arange(len(y)), kept) if missing != "error" else nan | infinite
            _refuse_bad(what, bad, column.rows, missing, columns)
        elif missing != "drop":  # else the values of samples that are left out are still there
            _refuse_bad(what, nan | infinite, column.values)
    if len(kept) < len(y):
        found = [replace(column, rows=chosen(column.rows, kept)) for column in found]
    return tuple(found), y[kept], kept


def values_of(column: Column[Rows]) -> Rows:
    """Return the numbers of a column: the values of sequences, else the rows."""
    return column.rows if column.values is None else column.values


def input_column(part: str, what: str, value: object) -> Column[Rows]:
    """Return one input in its stored form; refuse one without numbers or samples."""
    found = value if isinstance(value, Column) else None
    values = values_of(found) if found else value if isinstance(value, StoredRows) else as_array(value, what)
    if values.ndim == 0:
        raise BadData(f"the {part} part is a single value; give one input and one target for each sample")
    if len(found.rows if found else values) == 0:
        raise BadData(f"the {part} part has no samples; give at least one")
    if values.dtype.kind not in "biuf" or values.size == 0:
        raise BadData(f"the {what} are of type {values.dtype} and shape {values.shape}; give numbers")
    if found is None:
        return Column(image_layout(values, turn=not isinstance(value, Tensor)))
    # Bytes in a sequence are numbers of something, and no pixels.
    return replace(found, values=joined([values], np.dtype(np.int64))) if values.dtype == np.uint8 else found


def _of_samples(column: Column[Rows], nan: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the samples with a NaN; in a sequence, any."""
    if column.values is None:
        return nan
    spans, before = column.rows[:], np.concatenate([[0], nan.cumsum()])
    return np.asarray(before[spans.sum(axis=1)] > before[spans[:, 0]])


def as_array(value: object, what: str) -> Array:
    """Return `value` as a NumPy array; tensors are not copied."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise BadData(f"the {what} are no regular array: {error}; all samples need one shape") from error
    if array.dtype == object and array.size and all(isinstance(one, str) for one in array.flat):
        # So pandas keeps texts.
        return array.astype(np.str_)
    if array.dtype == object:
        raise BadData(
            f"the {what} are Python objects ({type(value).__name__}), not numbers; "
            f"convert them, such as with numpy.asarray(..., dtype='float32')"
        )
    return array


def as_weights(given: object, samples: int, what: str) -> Array:
    """Return a weight for each sample, of shape (samples,), float64; `what` names them in messages."""
    found = given[:] if isinstance(given, StoredRows) else as_array(given, "weights")
    if found.dtype.kind not in "biuf" or found.size != samples:
        raise BadData(
            f"{what} are of type {found.dtype} and shape {found.shape}; give one number for each of "
            f"{samples:,} samples"
        )
    weights: Array = found.reshape(-1).astype(np.float64)
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any() or not weights.any():
        at = int(wrong.argmax())
        raise BadData(
            f"{what} must be finite numbers from 0, and not all be 0; that of sample {at} is {weights[at]}"
        )
    return weights


def stored_dtype(array: Rows) -> np.dtype[np.generic]:
    """Return the dtype of stored inputs: bytes stay bytes, other integers are int64, the rest floats."""
    if array.dtype == np.uint8:
        return array.dtype
    if array.dtype.kind in "iu":
        return np.dtype(np.int64)
    return float_dtype()


def as_floats(array: Array) -> Array:
    """Return numbers in the stored float dtype; those too large for it become inf."""
    with np.errstate(over="ignore"):
        return array.astype(float_dtype(), copy=False)


def tell_if_rounded(what: str, *chunks: Array) -> None:
    """Print it if numbers are rounded to more than a hundredth of their range. A chunk has one dimension."""
    low = float(min(np.fmin.reduce(chunk) for chunk in chunks if len(chunk)))
    high = float(max(np.fmax.reduce(chunk) for chunk in chunks if len(chunk)))
    if float_dtype() == np.float32 and 0 < high - low < 100 * max(-low, high) * 2.0**-24:
        print(f"{what}: differences are finer than float32 resolves; give --precision fp64", file=sys.stderr)


_doubles: ContextVar[bool] = ContextVar("_doubles", default=False)


@contextmanager
def keeping_doubles(wanted: bool) -> Iterator[None]:
    """Keep floats of data opened inside as float64, if `wanted`."""
    before = _doubles.set(wanted)
    try:
        yield
    finally:
        _doubles.reset(before)


def float_dtype() -> np.dtype[np.generic]:
    """Return the stored float dtype: float32, or float64 if wanted or torch's default."""
    double = _doubles.get() or torch.get_default_dtype() == torch.float64
    return np.dtype(np.float64 if double else np.float32)


def not_finite(rows: Rows) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the samples with NaN, and those with inf in the stored dtype."""
    nan, infinite = np.zeros((2, len(rows)), dtype=bool)
    if rows.dtype.kind == "f":
        dtype = stored_dtype(rows)
        with np.errstate(over="ignore"):
            for start, chunk in chunks_of(rows):
                values = chunk.astype(dtype, copy=False)
                if not np.isfinite(values).all():
                    flat, place = values.reshape(len(chunk), -1), slice(start, start + len(chunk))
                    nan[place], infinite[place] = np.isnan(flat).any(axis=1), np.isinf(flat).any(axis=1)
    return nan, infinite


def refuse_not_finite(what: str, rows: Rows) -> None:
    """Refuse NaN, inf, and numbers that become inf in the stored dtype."""
    _refuse_bad(what, np.logical_or(*not_finite(rows)), rows)


def _refuse_bad(
    what: str, bad: NDArray[np.bool_], rows: Rows, missing: str = "error", columns: Sequence[str] = ()
) -> None:
    if bad.any():
        first = int(bad.argmax())
        place = f"sample {first}"
        if columns:
            values = as_floats(rows[first : first + 1])
            wrong = np.isinf(values) if missing != "error" else ~np.isfinite(values)
            column = int(wrong.argmax())
            place = f"row {first + 1:,}, column '{columns[column]}'"
            if np.isnan(values[0, column]):
                raise BadData(
                    f"the {what} lack values in {int(bad.sum()):,} of {len(bad):,} rows, first in {place}; "
                    "leave these rows out by --data.missing drop, or let means stand for them by "
                    "--data.missing mean"
                )
        hint = ", or give --data.missing drop if NaN stands for a missing value" if missing == "error" else ""
        raise NotFinite(
            f"the {what} hold NaN or inf (or numbers too large for {stored_dtype(rows)}) in "
            f"{int(bad.sum()):,} of {len(bad):,} samples, first in {place}; drop or "
            f"replace them{hint}"
        )


def samples_per_chunk(array: Rows) -> int:
    """Return the number of samples of `array` in one chunk."""
    return max(1, CHUNK * len(array) // max(1, array.size))


def chunks_of(rows: Rows) -> Iterator[tuple[int, Array]]:
    """Read samples chunk by chunk: yield the number of each chunk's first sample, and the chunk."""
    step = samples_per_chunk(rows)
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def image_layout(inputs: Rows, turn: bool) -> Rows:
    """Return inputs in the stored layout: 8-bit pictures have channels, which come first."""
    if isinstance(inputs, StoredRows):
        laid = _laid(np.empty((1, *inputs.shape[1:]), inputs.dtype), turn)
        if laid.shape[1:] == inputs.shape[1:]:
            return inputs
        return inputs.changed(laid.shape[1:], partial(_laid, turn=turn))
    assert isinstance(inputs, np.ndarray), "rows are an array, or are read from a file"
    return _laid(inputs, turn)


def _laid(inputs: Array, turn: bool) -> Array:
    if inputs.ndim == 1:
        return inputs[:, None]
    if inputs.ndim == 3 and inputs.dtype == np.uint8:
        return inputs[:, None]
    if turn and channels_last(inputs.shape):
        return inputs.transpose(0, 3, 1, 2)
    return inputs


def channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether inputs of shape (samples, ...) are treated as pictures whose channels come last."""
    return len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS
