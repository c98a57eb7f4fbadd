"""What the starts of ranks share in a job that goes on after the loss of a rank. No torch.

ranks 0   train ✝
ranks 1            train ✝    after each loss `run/recovery_policy.py` says which ranks go on
ranks 2                       train ── the result
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tutti.launch.stop_request import StopRequests

DUE_S: Final = 0.1
"""Time between two calls of `Recovery.is_due`."""


class Replaced(Exception):
    """The ranks were ended because others take over."""


@dataclass(frozen=True)
class Recovery:
    """The caller's side of all starts of one job.

    Attributes:
        stopping: receives the signals of all starts; the caller acts on the last one.
        is_due: called every `DUE_S`; returns whether the ranks are to be ended, by `Replaced`.
    """

    stopping: StopRequests
    is_due: Callable[[], bool]
