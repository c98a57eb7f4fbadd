"""`tutti completion`, and the answer to a shell in which the Tab key was pressed.

    tutti completion bash      prints what the shell keeps: on Tab it runs `tutti` with _ARGCOMPLETE set
    tutti.cli.main:main        then calls `complete`, which writes candidates to file descriptor 8, and ends

The candidates come from the parser of the command that is being typed. None of them needs torch.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from typing_extensions import override

from tutti.cli import ASKED
from tutti.cli.command import Command
from tutti.cli.commands import COMMANDS
from tutti.cli.options import Parser, flags_of_parts, stem_of
from tutti.errors import BadOption
from tutti.registry import part
from tutti.run.config import PARTS, Options

SHELLS: Final = ("bash", "zsh", "fish")

DESCRIBING: Final = ("zsh", "fish")
"""The shells that show what a candidate is."""

_OTHER_NAMES: Final = {
    "strategy": ("auto",),
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("OneCycleLR", "plateau", "cosine", "warm", "linear"),
    "loss": ("auto",),
    "metrics": ("auto",),
}
"""Values of fields beside the names of parts."""

_SEVERAL: Final = {"models": "model", "schedules": "schedule", "strategies": "strategy"}
"""The options that take several parts with commas, and the field that takes one of them."""


@part("completion")
class CompletionCommand(Command):
    """Have the Tab key complete commands, options and names.

    Prints the lines that your shell needs for it. Have it read them at its start: bash by the line of the
    example in ~/.bashrc; zsh by eval "$(tutti completion zsh)" in ~/.zshrc, below compinit; fish by
    tutti completion fish | source in ~/.config/fish/config.fish.
    """

    aim = "set up the shell"
    example = 'eval "$(tutti completion bash)"'

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("shell", metavar="SHELL", help=f"your shell: {', '.join(SHELLS)}")

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        if own.shell not in SHELLS:
            raise BadOption(f"nothing can be completed in '{own.shell}'; give one of {', '.join(SHELLS)}")
        from argcomplete.shell_integration import shellcode

        print(shellcode(["tutti"], shell=own.shell))
        return 0


def complete() -> None:
    """Answer the shell that asks, and end this process."""
    from argcomplete import autocomplete
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    first = int(os.environ[ASKED])
    parser: argparse.ArgumentParser
    if words[first:] and words[first] in COMMANDS:
        # The command's own parser takes the command for the program.
        os.environ[ASKED] = str(first + 1)
        parser = parser_of(words[first], words[first + 1 :])
    else:
        parser = _parser_of_commands()
    autocomplete(parser, always_complete_options=False)


def _parser_of_commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tutti", allow_abbrev=False)
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name in COMMANDS:
        commands.add_parser(name, help=COMMANDS.summary(name))
    return parser


def parser_of(name: str, words: Sequence[str]) -> Parser:
    """Return the parser of a command, with what completes the values of its options.

    Args:
        name: of the command.
        words: those after it so far; the parts that they name have options of their own.
    """
    parser = COMMANDS[name]().parser()
    if os.environ.get("_ARGCOMPLETE_SHELL") in DESCRIBING:
        parser.write_help()
    for field in parser.dotted:
        _add_keys(parser, field, words)
    for action in parser.actions:
        if action.option_strings and action.option_strings[0].endswith(".KEY"):
            action.help = argparse.SUPPRESS
        elif action.help is not None:
            # Beside the candidate there is room for a few words.
            action.help = re.split(r"[;:(]", action.help.replace("%%", "%"))[0].strip()
        action.completer = _completer(action)  # type: ignore[attr-defined]
    return parser


def _completer(action: argparse.Action) -> Callable[..., list[str]] | None:
    """Return what completes the value of an argument; None: files."""
    field, metavar = _SEVERAL.get(action.dest, action.dest), str(action.metavar)
    if field in PARTS:
        return _one_of((*_OTHER_NAMES.get(field, ()), *PARTS[field]))
    if metavar.startswith("{"):
        values = metavar.strip("{}").split(",")
        return lambda **_: values
    return _nothing if metavar in ("N", "X") else None


def _add_keys(parser: Parser, field: str, words: Sequence[str]) -> None:
    """Add the options of the part that the words name for a field, such as --model.hidden."""
    stem, of = stem_of(field), field.removesuffix("_options")
    typed = [word.partition("=")[0] for word in words if word.startswith(f"{stem}.")]
    for flag in dict.fromkeys([*flags_of_parts(field, words), *typed]):
        parser.add_argument(flag, dest=argparse.SUPPRESS, help=f"option of the {of}")


def _one_of(names: Iterable[str]) -> Callable[..., list[str]]:
    """Return what completes a name, or the last of several with commas, or a file."""

    def found(prefix: str, **_: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        before, comma, _last = prefix.rpartition(",")
        return [*(f"{before}{comma}{name}" for name in names), *FilesCompleter()(prefix)]

    return found


def _nothing(**_: object) -> list[str]:
    return []
