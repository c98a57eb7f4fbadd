"""Opening a data set: one rank of each host reads it, into memory that all ranks of the host share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from tutti.comm.base import Communicator
from tutti.data.columns import Stored, columns_of, in_place_of
from tutti.data.contents import Contents
from tutti.data.parts import DataSet
from tutti.data.pool import read_once
from tutti.data.remote import local_copy
from tutti.data.rows import Array, Rows, chosen
from tutti.data.sources import read_source
from tutti.data.splits import Indices, split
from tutti.data.streaming.opening import open_streamed
from tutti.data.streaming.options import Streamable, streamable, without_stream
from tutti.data.targets import KnownClasses
from tutti.errors import UserError


def open_data(
    data: object,
    comm: Communicator,
    validation: float = 0.1,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    known: KnownClasses | None = None,
) -> DataSet:
    """Open a data set (collective): it is read once per host, into memory that the host's ranks share.

    8-bit inputs stay 8-bit; batches of them become float32 of mean 0 and deviation 1 per channel over the
    training samples. Floats are kept in torch's default type (float32; within
    `keeping_doubles` float64), not scaled; other integers as int64.

    Args:
        data: a name in `BUILT_IN`; the path of an IDX or NPZ file or of a folder with IDX
            files; `package.module:factory` or `file.py:factory`; (x, y) or ((x, y), (x_test, y_test)) of
            arrays or tensors; a map-style torch data set or a pair of them (train, test); or a dict with keys
            like those of an NPZ file. Only the first rank of each host looks at it.
        comm: all ranks.
        validation: share of the training samples that is kept aside, 0 to below 1, the same from each class.
            A source with a validation part of its own keeps that one.
        seed: decides which samples are kept aside.
        options: arguments of the factory; `classes`, how many classes there are, goes with all kinds of data.
            `stream` (True, False or "auto") and `buffer` (MB) are for folders of NPY files: their inputs are
            read window by window, where memory does not hold them.
        known: the classes of a model that the data are for.

    Returns:
        The data set; its arrays are views of shared memory.

    Raises:
        BadData: the data are missing, broken, or do not fit together. Every rank raises the same error.
        NotFinite: NaN or inf in the data.
        BadOption: an option that cannot be used.
        UnknownName: no such built-in data set, file, factory or option.
    """
    streamed = _streamed(data, options or {}, comm)
    if streamed.wanted:
        return open_streamed(streamed.given, comm, validation, seed, known)
    data, options = streamed.data, streamed.options
    return read_once(
        comm, lambda: _divided(read_source(data, options, known), validation, seed), _STREAMED
    ).dataset


def _divided(
    contents: Contents[Stored[Rows], Array], validation: float, seed: int
) -> Contents[Stored[Rows], Array]:
    """Return a data set whose validation part is some of the training samples, unless it has its own."""
    inputs, targets = contents.parts["train"]
    share = 0 if "validation" in contents.parts else validation
    kept, aside = split(targets, share, seed, contents.classes)
    if not len(aside):
        return contents

    def some(numbers: Indices) -> tuple[Stored[Rows], Array]:
        columns = [replace(column, rows=chosen(column.rows, numbers)) for column in columns_of(inputs)]
        return in_place_of(inputs, columns), targets[numbers]

    return replace(contents, parts={**contents.parts, "train": some(kept), "validation": some(aside)})


@dataclass(frozen=True)
class _Choice:
    """The decision to stream the data: on all hosts, or on none.

    Attributes:
        wanted: whether they are.
        given: the folder, if they can be.
        data: what is to be read otherwise.
        options: of that.
    """

    wanted: bool
    given: Streamable | None
    data: object
    options: Mapping[str, object]


def _streamed(data: object, options: Mapping[str, object], comm: Communicator) -> _Choice:
    """Decide whether data are streamed (collective); only the first rank of each host looks at them."""
    given: Streamable | UserError | None = None
    if comm.node.rank == 0:
        try:
            data = local_copy(data)
            given = streamable(data, options)
            options = without_stream(data, options)
        except UserError as error:
            given = error
    said = None if given is None else given.wanted if isinstance(given, Streamable) else given
    told = cast("list[bool | UserError | None]", comm.all_gather_objects(said))
    for one in told:
        if isinstance(one, UserError):
            raise one
    return _Choice(True in told, cast("Streamable | None", given), data, options)


_STREAMED: Final = (
    "write it as NPY files by: tutti data convert DATA NEW, and give --data NEW: such a folder is streamed"
)
