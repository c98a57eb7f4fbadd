"""The command line, `tutti COMMAND ...`. It imports neither torch nor MPI: the ranks do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import tutti
from tutti.cli.command import Command
from tutti.errors import BadOption, OutputClosed, TuttiError, UnknownName, with_remedy
from tutti.launch.cores import leave_binding_to_tutti
from tutti.launch.exit_reports import output_closed
from tutti.launch.runtime_settings import keep_memory
from tutti.records.texts import printable
from tutti.registry import Registry
from tutti.terminal import lasting_output

COMMANDS: Final[Registry[type[Command]]] = Registry("tutti.cli", "command")
"""The commands, each a class in a file of this package."""

AIMS: Final = (
    "train a network",
    "see how runs go, and what came out",
    "use a trained network",
    "find the best network",
    "find the fastest way to train",
    "look at the data and this machine",
)
"""The aims of the commands, in the order of the help."""

FARMS: Final = ("cv", "tune")
"""The commands that plan the cores of all ranks of this host."""


def run(words: Sequence[str]) -> int:
    """Run the command in the words after `tutti`; return its exit code.

    0: done; 1: a rank failed, or the verdict is no; 2: the input is wrong; 141: nobody reads the output.
    """
    keep_memory()
    with lasting_output():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    try:
        code = _choose(words)
        sys.stdout.flush()
        return code
    except (OutputClosed, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError) and not output_closed():
            raise
        # Python flushes its buffer again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OutputClosed.exit_code
    except TuttiError as error:
        return _report(error)
    except OSError as error:
        known = with_remedy(error)
        if known is None:
            raise
        return _report(known)


def _report(error: TuttiError) -> int:
    """Print the error after all earlier output; return its exit code."""
    sys.stdout.flush()
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
    if name.startswith("-"):
        hint = "The options of a command follow it: tutti COMMAND [OPTIONS]. See 'tutti --help'."
        raise UnknownName("option", name.partition("=")[0], ("--help", "--version"), hint)
    if name not in COMMANDS:
        raise UnknownName("command", name, COMMANDS, "See 'tutti --help'.")
    if name in FARMS:
        # scikit-learn loads OpenMP, which may bind this process, and its children, to one core.
        leave_binding_to_tutti()
    return COMMANDS[name]()(rest)


def _help() -> str:
    of_aims: dict[str, list[str]] = {aim: [f"{aim}:"] for aim in AIMS}
    width = max(map(len, COMMANDS))
    for name in COMMANDS:
        text = COMMANDS.summary(name).removesuffix(".")
        of_aims[COMMANDS.literal(name, "aim")].append(f"  {name:{width}} {text[0].lower()}{text[1:]}")
    return _HELP.format("\n\n".join("\n".join(lines) for lines in of_aims.values()))


_HELP: Final = """\
usage: tutti COMMAND [OPTIONS]

Train a neural network on every core, GPU and machine you have.

{}

'tutti COMMAND --help' explains the options of a command, 'tutti COMMAND --help
all' the rarer ones, too; 'tutti --version' prints the version. 'tutti train'
alone trains a small network on the embedded digits, on every core."""
