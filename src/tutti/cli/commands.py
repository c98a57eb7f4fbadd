"""The command line: `tutti COMMAND ...`. It imports neither torch nor MPI; the ranks do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import tutti
from tutti.cli.command import Command
from tutti.errors import BadOption, OutputClosed, TuttiError, UnknownName, UserError, no_room, too_many_files
from tutti.launch.exit_reports import output_closed
from tutti.launch.launcher import started_by
from tutti.launch.malloc import keep_memory
from tutti.records.untrusted import printable
from tutti.terminal import lasting_output

COMMANDS = {
    "train": "train a network in parallel",
    "plan": "measure which ranks, threads, layout and precision are fastest here",
    "layouts": "how much memory a rank needs, by what ranks share of a model",
    "compare": "train by several ways in turn: which is fastest here?",
    "watch": "follow a run: epochs, time left, and the health of each rank",
    "evaluate": "evaluate the network of a run folder",
    "report": "table and page of a comparison, from its records",
    "verify": "show that parallel training follows sequential training",
    "run": "run a program of your own on several ranks",
    "doctor": "what this machine has, and what to run on it",
}
"""The commands, each with what it does; each is the module of that name beside this one."""


def run(words: Sequence[str]) -> int:
    """Run one command.

    Args:
        words: those after `tutti`.

    Returns:
        The exit code: 0 done, 1 a rank failed, the verdict is no or what was printed is not all there, 2 the
        input is wrong, 141 nobody reads what is printed.
    """
    keep_memory()
    with lasting_output() as output:
        code = _run(words)
        if output.problem is not None:
            print(f"tutti: error: standard output is not all there: {output.problem}", file=sys.stderr)
            code = code or TuttiError.exit_code
        return code


def _run(words: Sequence[str]) -> int:
    try:
        code = _choose(words)
        _flush()
        return code
    except (OutputClosed, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError) and not output_closed():
            raise
        # Python flushes its buffer once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OutputClosed.exit_code
    except TuttiError as error:
        return _say(error)
    except OSError as error:
        known = no_room(error) or too_many_files(error)
        if known is None:
            raise
        return _say(known)


def _say(error: TuttiError) -> int:
    """Print the error, after all that was printed before; returns its exit code."""
    _flush()
    if not _repeated():
        print(f"tutti: error: {printable(str(error), lines=True)}", file=sys.stderr)
    return error.exit_code


def _choose(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else BadOption.exit_code
    if words[0] in ("-V", "--version"):
        print(f"tutti {tutti.__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise UnknownName(
            "option" if name.startswith("-") else "command", name, COMMANDS, "See 'tutti --help'."
        )
    command: Command = import_module(f"tutti.cli.{name}").COMMAND
    return command(rest)


def _help() -> str:
    lines = [
        "usage: tutti COMMAND [OPTIONS]",
        "",
        "Train a neural network on every core, GPU and machine you have.",
        "",
    ]
    lines += ["commands:"]
    lines += [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    lines += [
        "",
        "'tutti COMMAND --help' explains every option of a command; 'tutti --version' prints the version.",
    ]
    lines += ["'tutti train' alone trains a small network on the embedded digits, on every core."]
    return "\n".join(lines)


def _repeated() -> bool:
    """Whether another rank of the same MPI job says the same: each of them has read the same command."""
    try:
        around = started_by()
    except UserError:
        return False
    return around.mpi and bool(around.rank)


def _flush() -> None:
    """What was printed so far comes before the error."""
    sys.stdout.flush()
