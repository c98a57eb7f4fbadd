"""Data sets in memory that outlives ranks: the first to need one reads it for later ranks and other blocks.

    root      where the last index begins
    index     its length │ data set ▸ its place and its outline
    arena     │ root │ samples of one data set │ index │ samples of another │ index of both │ ...

The process that starts the ranks has made the arena: a farm's for its blocks, a run's for the ranks after a
loss. The rank that reads has the lock on the root, for which others wait asleep; the kernel frees it if the
rank dies, and the next reader frees the memory that it has left. Runs see their parts as rows of the same
memory: nothing is copied.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.comm.shm.arena import FIRST, ROOT, Arena
from tutti.comm.shm.memfd import FileAddress
from tutti.data import DataSet, SamplePool
from tutti.data.arrays import keeping_doubles
from tutti.data.sources import read_source
from tutti.data.targets import meant_by
from tutti.errors import UserError
from tutti.launch.runtime_settings import give_back_memory
from tutti.load_object import names_object
from tutti.records.json_lines import to_json
from tutti.run.build import data_seed, given_data, open_config_data, options_of_weights, seeded, weights_data
from tutti.run.jobs import Recipe


class _Lying(NamedTuple):
    """A data set in the arena: its place and outline, and its division in one run; empty: not kept."""

    offset: int
    outline: SamplePool
    divided: bytes = b""


class SharedData:
    """The data sets of this host, as one of its ranks sees them; with `one_run` also divided and scaled."""

    def __init__(self, address: FileAddress, *, one_run: bool = False) -> None:
        self._arena, self._one_run = Arena.open(address), one_run
        self._known: dict[str, _Lying] = {}
        self._seen: dict[int, SamplePool] = {}

    def open(self, recipe: Recipe, comm: Communicator) -> DataSet:
        """Open the data set of a run (collective), as `open_config_data` does, reading it at most once."""
        location: _Lying | UserError | None = None
        if comm.node.rank == 0:
            try:
                location = self._look_up(recipe)
            except UserError as error:
                location = error  # the other ranks wait for the leader's word
        lying = cast("_Lying | UserError", comm.node.broadcast_object(location))
        if isinstance(lying, UserError):
            raise lying
        pool = self._pool(lying)
        if lying.divided:
            return cast("DataSet", _PoolUnpickler(lying.divided, pool).load())
        dataset = open_config_data(recipe, comm, pool)
        if self._one_run and comm.node.rank == 0:
            with self._arena.lock(ROOT):
                self._known[_key(recipe)] = lying._replace(divided=_pickled(dataset, pool))
                self._write_index()
        return dataset

    def _look_up(self, recipe: Recipe) -> _Lying:
        key = _key(recipe)
        if key not in self._known:
            with self._arena.lock(ROOT):
                self._known, end = self._read_index()
                if key not in self._known:
                    self._arena.release_from(end)  # A rank that died while it read has left this.
                    self._read(recipe, key)
                    give_back_memory()  # No job needs as much again.
        return self._known[key]

    def _read(self, recipe: Recipe, key: str) -> None:
        with seeded(data_seed(recipe.config)), keeping_doubles(recipe.config.precision == "fp64"):
            given, own = given_data(recipe)
            begun = weights_data(recipe) if recipe.config.weights else None
            options = options_of_weights(recipe, begun) or own
            contents = read_source(given, options, meant_by(recipe.config.loss))
            outline = SamplePool.outline(contents)
        outline.refuse_too_large()
        self._known[key] = _Lying(self._arena.allocate(outline.nbytes), outline)
        self._pool(self._known[key]).fill(contents)
        self._write_index()

    def _pool(self, lying: _Lying) -> SamplePool:
        if lying.offset not in self._seen:
            memory = self._arena.tensor(lying.offset, (lying.outline.nbytes,), torch.uint8)
            self._seen[lying.offset] = lying.outline.laid(memory)
        return self._seen[lying.offset]

    def _read_index(self) -> tuple[dict[str, _Lying], int]:
        """Return the data sets, and the end of the last."""
        begin = self._arena.words(ROOT, 1)[0]
        if not begin:
            return {}, FIRST
        length = self._arena.words(begin, 1)[0]
        content = self._arena.words(begin + 8, -(-length // 8)).cast("B")[:length]
        return pickle.loads(content), begin + 8 + length

    def _write_index(self) -> None:
        content = pickle.dumps(self._known)
        begin = self._arena.allocate(8 + len(content))
        self._arena.words(begin, 1)[0] = len(content)
        self._arena.words(begin + 8, -(-len(content) // 8)).cast("B")[: len(content)] = content
        self._arena.words(ROOT, 1)[0] = begin  # Last: from here on all of it is there.


def _pickled(dataset: DataSet, pool: SamplePool) -> bytes:
    file = io.BytesIO()
    _PoolPickler(file, pool).dump(dataset)
    return file.getvalue()


class _PoolPickler(pickle.Pickler):
    """Writes numbers in place of the tensors of a pool."""

    def __init__(self, file: io.BytesIO, pool: SamplePool) -> None:
        super().__init__(file)
        self._numbers = {id(tensor): number for number, tensor in enumerate(_tensors(pool))}

    @override
    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))


class _PoolUnpickler(pickle.Unpickler):
    """Reads what `_PoolPickler` has written for a pool like this one."""

    def __init__(self, content: bytes, pool: SamplePool) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = _tensors(pool)

    @override
    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _tensors(pool: SamplePool) -> list[Tensor]:
    return [tensor for part in pool.dataset.parts for tensor in part.tensors()]


def _key(recipe: Recipe) -> str:
    """Return a key of the options that determine a run's samples before they are divided."""
    config = recipe.config
    # A factory may draw random numbers, which depend on the seed.
    seed = data_seed(config) if names_object(config.data) else None
    double, meant = config.precision == "fp64", meant_by(config.loss)
    # A table is read with the columns that the weights take.
    named = to_json([config.data, config.data_options, seed, double, meant, config.weights])
    return hashlib.sha256(named.encode()).hexdigest()
