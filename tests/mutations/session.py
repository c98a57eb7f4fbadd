"""Runs the tests of some modules against each of their mutants, in processes forked once all are collected.

collect ── fork ── run every test once, with hits ──► which lines each test runs, and how long it takes
        └─ fork ── put a mutant in place ── run the tests of its line, the quickest first, until one fails

Ranks that tests start are forked there too, and so run the mutant; what they hit is noted in shared memory.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from tests import forked
from tests.mutations.operators import Mutant
from tests.mutations.patching import HIT, put_in_place, with_hits
from tutti.checkpoint.writer import PROGRAM

SLACK: Final = 5.0
"""A test may take so many times what it takes without a mutant."""

LEAST_S: Final = 5.0
"""It may take so much longer in any case."""

NOTICED, SURVIVED, HUNG, UNSEEN = "noticed", "survived", "hung", "no test runs it"


@dataclass
class Target:
    """A module that is broken.

    Attributes:
        module: its name.
        path: its file.
        source: what is in it.
        mutants: what is tried.
    """

    module: str
    path: str
    source: str
    mutants: list[Mutant]


class Deadline:
    """When a process is to have ended its test, in memory that it shares with its parent."""

    def __init__(self) -> None:
        self._time = ctypes.c_double.from_buffer(mmap.mmap(-1, ctypes.sizeof(ctypes.c_double)))
        self.extend(0.0)

    def extend(self, seconds: float) -> None:
        """Begin a test that takes so long without a mutant."""
        self._time.value = time.monotonic() + LEAST_S + SLACK * seconds

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._time.value


class Hits:
    """The lines of modules that this process, and those that it forks, have run."""

    def __init__(self, targets: Sequence[Target]) -> None:
        lengths = [len(target.source.splitlines()) + 1 for target in targets]
        self._firsts = {target.module: sum(lengths[:number]) for number, target in enumerate(targets)}
        self._marks = mmap.mmap(-1, sum(lengths))
        for target in targets:
            vars(sys.modules[target.module])[HIT] = self._marker(self._firsts[target.module])
            put_in_place(target.module, with_hits(ast.parse(target.source)))

    def _marker(self, first: int) -> Callable[[int], None]:
        marks = self._marks

        def mark(line: int) -> None:
            marks[first + line] = 1

        return mark

    def take(self) -> list[tuple[str, int]]:
        """Those since it was last asked."""
        whole = bytes(self._marks)
        self._marks[:] = bytes(len(whole))
        places = [at for at, mark in enumerate(whole) if mark]
        found = []
        for module, first in reversed(self._firsts.items()):
            found += [(module, at - first) for at in places if at >= first]
            places = [at for at in places if at < first]
        return found


@dataclass
class Running:
    """A process that tries a mutant."""

    target: Target
    mutant: Mutant
    process: int
    deadline: Deadline


@dataclass
class Session:
    """A plugin of pytest that runs the collected tests against each mutant.

    Attributes:
        targets: the modules and their mutants.
        workers: how many processes at a time.
        found: what became of each mutant.
        dropped: tests that fail without any mutant, each with its error.
    """

    targets: Sequence[Target]
    workers: int
    found: list[tuple[Target, Mutant, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def pytest_configure(self) -> None:
        """The same examples for every mutant, and none of them kept."""
        from hypothesis import settings

        settings.register_profile("mutations", database=None, derandomize=True, deadline=None)
        settings.load_profile("mutations")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run, in place of pytest's own loop."""
        for target in self.targets:
            importlib.import_module(target.module)
        _fork_ranks_here()
        _refuse_other_processes()
        # Made once: each process would make one.
        folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        items, began = session.items, time.monotonic()
        measured = self._measure(session, items, folder)
        usable = {at: one for at, one in measured.items() if one["passed"]}
        self.dropped = [f"{items[at].nodeid}: {one['error']}" for at, one in measured.items() if one["error"]]
        _say(f"{len(usable)} tests of {len(items)}, once, in {time.monotonic() - began:.0f} s")
        queue = []
        for target in self.targets:
            for mutant in target.mutants:
                tests = _tests_of(target, mutant, usable)
                if tests:
                    queue.append((target, mutant, tests))
                else:
                    self.found.append((target, mutant, UNSEEN))
        self._try_all(session, queue, {at: one["seconds"] for at, one in usable.items()})
        return True

    def _measure(
        self, session: pytest.Session, items: Sequence[pytest.Item], folder: Path
    ) -> dict[int, dict]:
        """How long each test takes, whether it passes, and the lines of the targets that it runs."""

        def run(part: int, output: Path) -> None:
            hits = Hits(self.targets)
            found = []
            own = range(part, len(items), self.workers)
            for at, following in zip(own, [*(items[at] for at in own[1:]), None], strict=True):
                hits.take()
                began = time.monotonic()
                reports = _run(session, items[at], following)
                found.append(
                    {
                        "at": at,
                        "passed": all(report.passed for report in reports),
                        "error": _error(reports),
                        "seconds": time.monotonic() - began,
                        "hits": hits.take(),
                    }
                )
            output.write_text(json.dumps(found))

        outputs = [folder / f"measured{part}.json" for part in range(self.workers)]
        processes = [
            _start(lambda part=part, output=output: run(part, output)) for part, output in enumerate(outputs)
        ]
        for process in processes:
            _end(os.pidfd_open(process), process)
        if not all(output.exists() for output in outputs):
            raise RuntimeError("the tests cannot be run with marks in the modules; see `put_in_place`")
        return {one["at"]: one for output in outputs for one in json.loads(output.read_text())}

    def _try_all(
        self,
        session: pytest.Session,
        queue: list[tuple[Target, Mutant, list[int]]],
        seconds: dict[int, float],
    ) -> None:
        running: dict[int, Running] = {}
        left, total = list(reversed(queue)), len(queue)
        while left or running:
            while left and len(running) < self.workers:
                target, mutant, tests = left.pop()
                tests = sorted(tests, key=lambda at: seconds[at])
                deadline = Deadline()
                work = partial(_try, session, target, mutant, [(at, seconds[at]) for at in tests], deadline)
                process = _start(work)
                running[os.pidfd_open(process)] = Running(target, mutant, process, deadline)
            for ended in wait(running, 1.0):
                one = running.pop(ended)
                code = _end(ended, one.process)
                what = SURVIVED if code == 0 else HUNG if code == -signal.SIGKILL else NOTICED
                self.found.append((one.target, one.mutant, what))
                if what == SURVIVED:
                    _say(f"{what}: {one.target.path}:{one.mutant.line}: {one.mutant.change}")
                if len(self.found) % 50 == 0:
                    _say(f"{len(self.found)} of {total}")
            for one in running.values():
                if one.deadline.over:
                    os.killpg(one.process, signal.SIGKILL)


def _tests_of(target: Target, mutant: Mutant, usable: dict[int, dict]) -> list[int]:
    """The tests that run one of the mutant's lines."""
    return [
        at
        for at, one in usable.items()
        if any(name == target.module and line in mutant.lines for name, line in one["hits"])
    ]


def _try(
    session: pytest.Session,
    target: Target,
    mutant: Mutant,
    tests: Sequence[tuple[int, float]],
    deadline: Deadline,
) -> None:
    put_in_place(target.module, mutant.tree())
    items = [session.items[at] for at, _ in tests]
    for (_, seconds), item, following in zip(tests, items, [*items[1:], None], strict=True):
        deadline.extend(seconds)
        _run(session, item, following)
        if session.testsfailed:
            os._exit(1)


def _run(
    session: pytest.Session, item: pytest.Item, following: pytest.Item | None
) -> list[pytest.TestReport]:
    """Run a test; fixtures that the following one needs too are kept."""
    reports = []

    class Watching:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            reports.append(report)

    watching = Watching()
    session.config.pluginmanager.register(watching)
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    session.config.pluginmanager.unregister(watching)
    return reports


def _error(reports: Sequence[pytest.TestReport]) -> str:
    """What a test failed with, on one line; "" if it did not."""
    lines = [line for report in reports if report.failed for line in report.longreprtext.splitlines()]
    told = [line[1:].strip() for line in lines if line.startswith("E ")]
    return " ".join(told or lines[-1:])[:300]


def _start(work: Callable[[], None]) -> int:
    """Work in a process that leads a group of its own, which ends without going back to pytest."""
    process = os.fork()
    if process:
        return process
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(forked.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _end(descriptor: int, process: int) -> int:
    """Wait for a process that `_start` has started, and end what it leaves behind; its exit code."""
    wait([descriptor])
    os.killpg(process, signal.SIGKILL)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _fork_ranks_here() -> None:
    """Fork ranks from the process of their test, as it has the mutant, and not from a server."""
    forked._context = multiprocessing.get_context("fork")
    # A test's filters of warnings are not those of its ranks.
    os.register_at_fork(after_in_child=warnings.resetwarnings)


def _refuse_other_processes() -> None:
    """Skip tests that start processes otherwise: those would run the code as it is in its file.

    So does a writer of checkpoints, but tests are about what the ranks give it and read again.
    """
    start = subprocess.Popen.__init__

    def start_writer(self: subprocess.Popen, args: Any, *others: Any, **options: Any) -> None:
        if PROGRAM not in args:
            pytest.skip("starts processes")
        start(self, args, *others, **options)

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.skip("starts processes")

    subprocess.Popen.__init__ = start_writer  # type: ignore[method-assign]
    for method in ("spawn", "forkserver"):
        multiprocessing.get_context(method).Process.start = refuse  # type: ignore[method-assign]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
