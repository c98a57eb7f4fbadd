"""The global state of a process, put back after each job: what one job sets, the next one does not find.

Code of the user's may change more than that, so ranks that have run some are not given another job
(`blocks.py`).
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from tutti.records.untrusted import open_unlinked


@contextmanager
def globals_kept() -> Iterator[None]:
    """Put back what a program may set in torch, NumPy, Python and the process (but for random generators)."""
    before = _TorchSettings()
    errors, environment, folder = np.geterr(), dict(os.environ), os.getcwd()
    path, arguments = list(sys.path), list(sys.argv)
    try:
        # Besides the filters this has each warning shown again that an earlier job has shown.
        with warnings.catch_warnings():
            yield
    finally:
        before.put_back()
        np.seterr(**errors)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        with suppress(FileNotFoundError):
            os.chdir(folder)
        sys.path[:], sys.argv[:] = path, arguments
    # What a model and its optimizer hold is freed only now where they refer to each other.
    gc.collect()


class _TorchSettings:
    """The settings of torch, as they are now."""

    def __init__(self) -> None:
        self._floats = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._gradients = torch.is_grad_enabled()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self._products = torch.get_float32_matmul_precision()
        self._anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        self._cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
        self._mkldnn = torch.backends.mkldnn.enabled

    def put_back(self) -> None:
        """Set them again."""
        torch.set_default_dtype(self._floats)
        if torch.get_default_device() != self._device:
            torch.set_default_device(self._device)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        torch.set_grad_enabled(self._gradients)
        wanted, warned = self._deterministic
        torch.use_deterministic_algorithms(wanted, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = self._filled  # type: ignore[attr-defined]
        if torch.get_float32_matmul_precision() != self._products:
            torch.set_float32_matmul_precision(self._products)
        torch.autograd.set_detect_anomaly(*self._anomalies)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._cudnn
        torch.backends.mkldnn.enabled = self._mkldnn


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Append all that this process prints, its threads and children included, to a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    file = open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        _flush()
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        yield
    finally:
        _flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        os.close(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A job may have closed it, or put another one there.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
