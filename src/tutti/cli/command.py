"""A command of the command line: its options and its work."""

from __future__ import annotations

import argparse
import inspect
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import ClassVar

from tutti.cli.options import Parser, Words, flags_of_parts, split_dotted
from tutti.errors import EXIT_INTERRUPTED, BadOption, BadRunFolder, UnknownName, UserError

COLUMN = 30


class Command(ABC):
    """One command of the command line.

    The docstring of a command is the head of its help; its first line is in the help of `tutti`.

    Attributes:
        name: the word after `tutti`.
        aim: its purpose: the help of `tutti` puts commands of one aim together.
        example: a command to paste; the foot of its help.
        own_words: whether what follows the first word without a dash belongs to a program of the user's.
    """

    name: ClassVar[str]
    aim: ClassVar[str]
    example: ClassVar[str]
    own_words: ClassVar[bool] = False

    def define(self, parser: Parser) -> None:
        """Add the options to the parser."""
        return

    @abstractmethod
    def run(self, words: Words) -> int:
        """Do the work, and return the exit code."""

    def parser(self) -> Parser:
        """The parser of its options."""
        about, epilog = inspect.cleandoc(self.__doc__ or ""), f"example:\n  {self.example}"
        parser = Parser(prog=f"tutti {self.name}", description=about, epilog=epilog)
        self.define(parser)
        return parser

    def __call__(self, words: Sequence[str]) -> int:
        """Parse the words after the command's name, and run it."""
        parser = self.parser()
        if not {"-h", "--help"}.isdisjoint(words[:1] if self.own_words else words):
            more = "\n" + strategy_help(words) if "strategy" in parser.fields else ""
            print(parser.format_help(), end=more)
            return 0
        return self.run(self.parse(words, parser))

    def parse(self, words: Sequence[str], parser: Parser) -> Words:
        """Return what `run` gets."""
        rest, dotted = (words, {}) if self.own_words else split_dotted(words, parser.dotted)
        parsed, unknown = parser.parse_known_args(rest)
        strange = [word for word in unknown if word.startswith("-")] or unknown
        if strange:
            name = strange[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            explains = f"'tutti {self.name} --help' explains every option."
            if kind == "argument":
                raise UnknownName(kind, name, (), explains)
            of_parts = [flag for field in parser.dotted for flag in flags_of_parts(field, words)]
            meant = [flag for flag in of_parts if name == f"--{flag.partition('.')[2]}"]
            if meant:
                raise BadOption(f"unknown option '{name}'; did you mean '{meant[0]}'? {explains}")
            raise UnknownName(kind, name, [*parser.flags(), *of_parts], explains)
        if (group := getattr(parsed, "group_by", None)) is not None:
            dotted.setdefault("data_options", {})["group"] = group
        given = {name: value for name, value in vars(parsed).items() if name in parser.fields}
        own = {name: value for name, value in vars(parsed).items() if name not in given}
        return Words([self.name, *words], argparse.Namespace(**own), given, dotted)


def strategy_help(words: Sequence[str]) -> str:
    """The options of the strategy that `--strategy` names, or how to see those of one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--strategy", nargs="?")
    name = parser.parse_known_args(words)[0].strategy
    if name is None:
        return "'--strategy NAME --help' explains the options of a strategy.\n"
    from tutti.strategies import named

    kind = named(name)
    lines = [f"options of strategy {kind.name}:"]
    width = shutil.get_terminal_size().columns - 2  # as argparse has it
    for field in fields(kind):
        text = f"{field.metadata.get('help', 'no description')} (default: {field.default})"
        flag = f"  --strategy.{field.name.replace('_', '-')} VALUE"
        lead = f"{flag:{COLUMN - 2}}  " if len(flag) <= COLUMN - 2 else f"{flag}\n{'':{COLUMN}}"
        indent = " " * COLUMN
        text = fill(text, max(COLUMN + 20, width), initial_indent=indent, subsequent_indent=indent)
        lines.append(lead + text.lstrip())
    if len(lines) == 1:
        lines.append("  it has none")
    return "\n".join(lines) + "\n"


def print_page(write: Callable[[], Path], folder: Path) -> None:
    """Write a page and print its path, or what it takes to have one."""
    try:
        print(f"report: {write()}", flush=True)
    except BadRunFolder:
        raise
    except UserError as error:
        print(f"tutti: warning: {error}; then run 'tutti report {folder}'", file=sys.stderr, flush=True)


def stopped(why: str, folder: Path) -> int:
    """Say how a command goes on that was stopped; returns its exit code."""
    print(f"stopped: {why}; go on by the same command with --resume --out {shlex.quote(str(folder))}")
    return EXIT_INTERRUPTED


def writable(path: Path, option: str) -> Path:
    """The path, of a file that can be written: found out before a minute is spent on what goes there."""
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise BadOption(f"cannot write {option} {path}: {error.strerror}; name another file") from error
    return path
