"""Data sets: where they come from, how they lie in memory once per host, and who takes which samples."""

from tutti.data.batches import Batch, Batches, Update
from tutti.data.builtin import BUILT_IN
from tutti.data.dealing import Queue
from tutti.data.opening import open_data
from tutti.data.parts import DataSet, Part, Scale

__all__ = ["BUILT_IN", "Batch", "Batches", "DataSet", "Part", "Queue", "Scale", "Update", "open_data"]
