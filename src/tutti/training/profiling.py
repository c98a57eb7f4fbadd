"""torch's own profiler, applied to some steps of a run."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

ROWS = 40
"""Rows of the table: the operators that take longest."""

QUIET: Final = ("KINETO_LOG_LEVEL", "6")
"""The setting that keeps the profiler from printing lines such as "USDT: ... profiler_start". It silences its
errors too, which without a GPU are nothing that a user could act on."""


@dataclass(frozen=True)
class Profile:
    """The profile of some steps.

    Attributes:
        table: the operators that took longest, as text.
        trace: all operators, as JSON in Chrome's trace event format.
    """

    table: str
    trace: bytes


class Profiler:
    """The profiler of steps `first` to `last`, counted from 1. Call it before each step.

    Attributes:
        found: the profile, once the last of the steps, or the run, is over; None before.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profile: profile | None = None
        self.found: Profile | None = None

    def __call__(self, made: int) -> None:
        """Begin or end the profile, if it is time.

        Args:
            made: the number of steps made before.
        """
        if self._profile is not None and made >= self._last:
            self.close()
        elif self._profile is None and self.found is None and self._first - 1 <= made < self._last:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            if not gpu:
                os.environ.setdefault(*QUIET)
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.start()

    def close(self) -> None:
        """End the profile, if it is under way."""
        if self._profile is None:
            return
        self._profile.stop()
        operators = self._profile.key_averages()
        on_gpu = any(operator.self_device_time_total for operator in operators)
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = operators.table(sort_by=by, row_limit=ROWS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            # torch indents its JSON; without, it is a third as large.
            trace = json.dumps(json.loads(path.read_bytes()), separators=(",", ":")).encode()
        self._profile, self.found = None, Profile(table, trace)
