"""Data sets: their sources, their one copy in memory per host, and the samples of each rank."""

from tutti.data.batches import Batch, Batches, Queue, Round
from tutti.data.builtin import BUILT_IN
from tutti.data.opening import open_data
from tutti.data.parts import DataSet, Part, Scale
from tutti.data.pool import SamplePool, divided, open_pool

__all__ = [
    "BUILT_IN",
    "Batch",
    "Batches",
    "DataSet",
    "Part",
    "Queue",
    "Round",
    "SamplePool",
    "Scale",
    "divided",
    "open_data",
    "open_pool",
]
