"""Fixtures that every test may use."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Models of tests are too small for several threads, and tests run beside each other. Set before torch is
# imported, and for every process that a test starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

# The key that seals configurations is one of the tests' own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="tutti-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Tests interrupt themselves. What a shell starts in the background ignores that, and would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """What a test sets in the environment, or has set there by what it calls, the next one does not find."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real data sets; the test is skipped where it is absent."""
    folder = os.environ.get("TUTTI_DATA")
    if not folder or not Path(folder, "mnist").is_dir():
        pytest.skip("TUTTI_DATA names no folder with the real data sets")
    return Path(folder)
