"""Runs the tests of some modules against each of their mutants, in processes forked once all are collected.

collect ── fork ── run every test once, with hits ──► which lines each test runs, and how long it takes
        └─ fork ── put a mutant in place ── run the tests of its line, the quickest first, until one fails
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Final, NoReturn

import pytest

from tests.mutations.operators import Mutant
from tests.mutations.patching import HIT, put_in_place, with_hits

SLACK: Final = 5.0
"""Tests of a mutant may take so many times what they take without it."""

LEAST_S: Final = 20.0
"""They may take so long in any case."""

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


@dataclass
class Running:
    """A process that tries a mutant, until its deadline."""

    target: Target
    mutant: Mutant
    process: int
    deadline: float


@dataclass
class Session:
    """A plugin of pytest that runs the collected tests against each mutant.

    Attributes:
        targets: the modules and their mutants.
        workers: how many processes at a time.
        found: what became of each mutant.
        dropped: tests that fail without any mutant.
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
        _refuse_other_processes()
        # Made once: each process would make one.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        items, began = session.items, time.monotonic()
        measured = self._measure(session, items)
        usable = {at: one for at, one in measured.items() if one["passed"]}
        self.dropped = [items[at].nodeid for at, one in measured.items() if one["failed"]]
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

    def _measure(self, session: pytest.Session, items: Sequence[pytest.Item]) -> dict[int, dict]:
        """How long each test takes, whether it passes, and the lines of the targets that it runs."""
        found: dict[int, dict] = {}

        def run(part: int, output: int) -> None:
            hits: set[tuple[str, int]] = set()
            for target in self.targets:
                module = sys.modules[target.module]
                name = target.module
                module.__dict__[HIT] = lambda line, name=name: hits.add((name, line))
                put_in_place(target.module, with_hits(ast.parse(target.source)))
            for at in range(part, len(items), self.workers):
                hits.clear()
                began, failed = time.monotonic(), session.testsfailed
                outcome = _run(session, items, [at])
                line = {
                    "at": at,
                    "passed": outcome == "passed",
                    "failed": session.testsfailed > failed,
                    "seconds": time.monotonic() - began,
                    "hits": sorted(hits),
                }
                os.write(output, (json.dumps(line) + "\n").encode())

        pipes = []
        for part in range(self.workers):
            reading, writing = os.pipe()
            if not os.fork():
                os.close(reading)
                _be_quiet()
                _leave(lambda part=part, writing=writing: run(part, writing))
            os.close(writing)
            pipes.append(os.fdopen(reading))
        for pipe in pipes:
            with pipe:
                for text in pipe:
                    line = json.loads(text)
                    found[line["at"]] = line
        failed = [os.wait()[1] for _ in pipes]
        if any(failed):
            raise RuntimeError("the tests cannot be run with marks in the modules; see `put_in_place`")
        return found

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
                limit = LEAST_S + SLACK * sum(seconds[at] for at in tests)
                process = os.fork()
                if not process:
                    os.setpgid(0, 0)
                    _be_quiet()
                    _leave(
                        lambda target=target, mutant=mutant, tests=tests: _try(session, target, mutant, tests)
                    )
                running[os.pidfd_open(process)] = Running(target, mutant, process, time.monotonic() + limit)
            for ended in wait(running, 1.0):
                one = running.pop(ended)
                os.close(ended)
                code = os.waitstatus_to_exitcode(os.waitpid(one.process, 0)[1])
                what = SURVIVED if code == 0 else HUNG if code == -signal.SIGKILL else NOTICED
                self.found.append((one.target, one.mutant, what))
                if what == SURVIVED:
                    _say(f"{what}: {one.target.path}:{one.mutant.line}: {one.mutant.change}")
                if len(self.found) % 50 == 0:
                    _say(f"{len(self.found)} of {total}")
            for one in running.values():
                if time.monotonic() > one.deadline:
                    os.killpg(one.process, signal.SIGKILL)


def _tests_of(target: Target, mutant: Mutant, usable: dict[int, dict]) -> list[int]:
    """The tests that run one of the mutant's lines."""
    return [
        at
        for at, one in usable.items()
        if any(name == target.module and line in mutant.lines for name, line in one["hits"])
    ]


def _try(session: pytest.Session, target: Target, mutant: Mutant, tests: Sequence[int]) -> None:
    put_in_place(target.module, mutant.tree())
    for at in tests:
        _run(session, session.items, [at])
        if session.testsfailed:
            os._exit(1)


def _run(session: pytest.Session, items: Sequence[pytest.Item], which: Sequence[int]) -> str:
    outcomes = []

    class Watching:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            outcomes.append((report.when, report.outcome))

    watching = Watching()
    session.config.pluginmanager.register(watching)
    for at in which:
        session.config.hook.pytest_runtest_protocol(item=items[at], nextitem=None)
    session.config.pluginmanager.unregister(watching)
    return "passed" if all(outcome == "passed" for _, outcome in outcomes) else "other"


def _be_quiet() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _leave(work: Callable[[], None]) -> NoReturn:
    """Work, and end this process without going back to pytest."""
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _refuse_other_processes() -> None:
    """Skip tests that start processes: those would run the code as it is in its file."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.skip("starts processes")

    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    BaseProcess.start = refuse  # type: ignore[method-assign]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
