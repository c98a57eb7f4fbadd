"""Fixtures that every test may use."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

TESTS = Path(__file__).parent

# Models of tests are too small for several threads, and tests run beside each other. Set before torch is
# imported, and for every process that a test starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# Ranks that share cores have this, and others not: with it for all of them, one fork server serves both.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# The key that seals configurations is one of the tests' own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="tutti-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Tests interrupt themselves. What a shell starts in the background ignores that, and would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What nohup starts ignores this one.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


LONGEST_FIRST = (
    "promises/",
    "cluster/",
    "strategies/test_conformance.py",
    "own_loop/test_loops.py",
    "launch/test_stop_request.py",
    "launch/test_mpirun.py",
    "launch/test_fork_server_client.py",
    "comm/test_mpi.py",
    "cli/test_console.py",
    "strategies/test_centre_state.py",
    "studies/test_compare.py",
    "studies/test_cv.py",
    "ecosystem/",
    "torch_backend/test_launching.py",
    "torch_backend/test_several_hosts_of_a_group.py",
    "own_loop/test_checkpoints.py",
    "own_loop/test_hosts.py",
    "docs/test_types_of_examples.py",
    "docs/test_lessons.py",
    "exports/",
    "watching/test_watch_hosts.py",
    "model_parallel/",
    "gpu/test_benchmark.py",
    "comm/test_interleavings.py",
    "launch/test_supervisor.py",
    "watching/test_watch",
    "records/test_hostile.py",
    "training/test_validation.py",
    "reports/test_browser.py",
)
"""The files that take longest: beside the last of them a core has nothing to do."""


_SERVES = pytest.StashKey[Callable[[], None]]()


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of programs that serves the tests of all worker processes, while these collect."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests.preloaded import SERVER, start_server
        from tests.preloaded.server import OF_STUDIES

        os.environ[SERVER], config.stash[_SERVES] = start_server(*OF_STUDIES)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One worker more than cores: a quarter of the time a test waits for processes that wait, too."""
    return (yield) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: WorkerController) -> None:
    """Have no test begin before that server serves."""
    node.config.stash[_SERVES]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while everything is imported, and none in that afterwards: it takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the longest files begin first."""

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(TESTS).as_posix()
        return next(
            (n for n, start in enumerate(LONGEST_FIRST) if path.startswith(start)), len(LONGEST_FIRST)
        )

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """What a test sets in the environment, or has set there by what it calls, the next one does not find."""
    before = dict(os.environ)
    yield
    # Setting all of them again takes longer than most tests.
    if dict(os.environ) != before:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _forked_servers() -> Iterator[None]:
    """Fork servers, multiprocessing's too, come with torch imported: each import takes seconds."""
    from tests.preloaded.children import forked_children
    from tests.preloaded.fork_servers import forked_fork_servers

    with forked_fork_servers(), forked_children():
        yield


@pytest.fixture(scope="module")
def nothing_beside() -> Iterator[None]:
    """Runs of this process share a writer of checkpoints: to start one takes longer than a small training."""
    # Most tests import no torch, or not yet.
    from tests.kept_writers import nothing_beside_runs

    with nothing_beside_runs():
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real data sets; the test is skipped where it is absent."""
    folder = os.environ.get("TUTTI_DATA")
    if not folder or not Path(folder, "mnist").is_dir():
        pytest.skip("TUTTI_DATA names no folder with the real data sets")
    return Path(folder)
