"""Data sets: their sources, their one copy in memory per host, and the samples of each rank."""

from tutti.data.batches import Batch, Batches, Queue, Round
from tutti.data.builtin import BUILT_IN
from tutti.data.opening import SamplePool, open_data, open_pool
from tutti.data.parts import DataSet, Part, Scale

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
    "open_data",
    "open_pool",
]
