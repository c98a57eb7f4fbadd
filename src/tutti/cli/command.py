"""A command of the command line: a parser of its own and a function."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.cli.options import Parser, split_dotted
from tutti.errors import UnknownName
from tutti.run.config import Options


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        name: the word after `tutti`.
        about: what it does; the head of its help.
        example: a command to paste; the foot of its help.
        define: adds the options to the parser.
        run: does the work, given the parsed options and those of the parts; returns the exit code.
        dotted: the fields whose options are given as --NAME.KEY.
        own_words: whether what follows the first word without a dash belongs to a program of the user's.
        more_help: what its help says beyond that, given the words after the command's name.
    """

    name: str
    about: str
    example: str
    define: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, dict[str, Options]], int]
    dotted: tuple[str, ...]
    own_words: bool = False
    more_help: Callable[[Sequence[str]], str] | None = None

    def parser(self) -> Parser:
        """The parser of its options."""
        parser = Parser(
            prog=f"tutti {self.name}", description=self.about, epilog=f"example:\n  {self.example}"
        )
        self.define(parser)
        return parser

    def __call__(self, words: Sequence[str]) -> int:
        """Parse the words after the command's name, and run it.

        Raises:
            TuttiError: the options are wrong, or the run failed.
        """
        parser = self.parser()
        if not {"-h", "--help"}.isdisjoint(words[:1] if self.own_words else words):
            print(parser.format_help(), end="")
            if self.more_help is not None:
                print("\n" + self.more_help(words), end="")
            return 0
        if self.own_words:
            return self.run(parser.parse_args(words), {})
        rest, dotted = split_dotted(words, self.dotted)
        given, unknown = parser.parse_known_args(rest)
        strange = [word for word in unknown if word.startswith("-")] or unknown
        if strange:
            name = strange[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            known = parser.flags() if kind == "option" else ()
            raise UnknownName(kind, name, known, f"'tutti {self.name} --help' explains every option.")
        return self.run(given, dotted)
