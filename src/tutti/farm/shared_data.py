"""The data sets of a farm, once on each host: whichever block needs one first reads it, and all see it.

    index     │ data set ▸ where it lies, and what it is
    arena     │ index │ samples of one data set │ samples of another │ ...

The rank that reads has the lock on the index, for which others wait asleep; the kernel frees it if the rank
dies. Jobs see their parts as rows of the same memory: nothing is copied.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import NamedTuple, cast

import torch

from tutti.comm.base import Communicator
from tutti.comm.shm.arena import Arena
from tutti.data import DataSet, SamplePool
from tutti.data.arrays import keeping_doubles
from tutti.data.sources import read_source
from tutti.data.targets import meant_by
from tutti.errors import UserError
from tutti.farm.messages import INDEX_BYTES, SharedPlace
from tutti.launch.runtime_settings import give_back_memory
from tutti.load_object import names_object
from tutti.records.json_lines import to_json
from tutti.run.build import data_seed, given_data, open_config_data, seeded
from tutti.run.jobs import Recipe


class _Lying(NamedTuple):
    """A data set in the arena: where it begins, and what it is."""

    offset: int
    outline: SamplePool


class SharedData:
    """The data sets of this host, as one of its ranks sees them.

    Args:
        place: where they are.
    """

    def __init__(self, place: SharedPlace) -> None:
        self._arena, self._index = Arena.open(place.arena), place.table
        self._known: dict[str, _Lying] = {}
        self._seen: dict[int, SamplePool] = {}

    def open(self, recipe: Recipe, comm: Communicator) -> DataSet:
        """Open the data set of a run (collective), as `open_config_data` does; it is read if it never was."""
        found: _Lying | UserError | None = None
        if comm.node.rank == 0:
            try:
                found = self._look_up(recipe)
            except UserError as error:
                found = error  # the other ranks wait for the leader's word
        lying = comm.node.broadcast_object(found)
        if isinstance(lying, UserError):
            raise lying
        return open_config_data(recipe, comm, self._pool(cast("_Lying", lying)))

    def _look_up(self, recipe: Recipe) -> _Lying:
        key = _key(recipe)
        if key not in self._known:
            with self._arena.lock(self._index):
                self._known = self._read_index()
                if key not in self._known:
                    self._read(recipe, key)
                    give_back_memory()  # No job needs as much again.
        return self._known[key]

    def _read(self, recipe: Recipe, key: str) -> None:
        with seeded(data_seed(recipe.config)), keeping_doubles(recipe.config.precision == "fp64"):
            given, options = given_data(recipe)
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

    def _read_index(self) -> dict[str, _Lying]:
        length = self._arena.words(self._index, 1)[0]
        if not length:
            return {}
        words = self._arena.words(self._index + 8, -(-length // 8))
        known: dict[str, _Lying] = pickle.loads(words.cast("B")[:length])
        return known

    def _write_index(self) -> None:
        content = pickle.dumps(self._known)
        if 8 + len(content) > INDEX_BYTES:
            # It is read again by each block: slower, and no less right.
            return
        self._arena.words(self._index + 8, -(-len(content) // 8)).cast("B")[: len(content)] = content
        self._arena.words(self._index, 1)[0] = len(content)


def _key(recipe: Recipe) -> str:
    """Return what decides which samples a run has, before they are divided."""
    config = recipe.config
    # A factory may draw random numbers, which depend on the seed.
    seed = data_seed(config) if names_object(config.data) else None
    double, meant = config.precision == "fp64", meant_by(config.loss)
    named = to_json([config.data, config.data_options, seed, double, meant])
    return hashlib.sha256(named.encode()).hexdigest()
