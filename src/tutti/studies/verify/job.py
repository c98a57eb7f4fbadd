"""The job of a comparison with sequential training. Needs no torch: the launching process imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tutti.run.jobs import Job

DTYPES: Final = {"float32": "fp32", "float64": "fp64"}
"""The numbers that a comparison can compute with, and the precision of the configuration that this is."""


@dataclass(frozen=True)
class VerifyJob(Job):
    """A comparison of parallel with sequential training, for `config.steps` steps.

    Attributes:
        dtype: float32 or float64.
    """

    entry: ClassVar[str] = "tutti.studies.verify.follow:work"
    trains: ClassVar[bool] = True
    compared: ClassVar[bool] = True

    dtype: str
