"""A command of the command line: its options and its work."""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Final

from tutti.cli.options import Parser, Words, flags_of_parts, split_dotted, stem_of
from tutti.errors import EXIT_INTERRUPTED, BadOption, BadRunFolder, UnknownName, UserError
from tutti.load_object import names_object
from tutti.models import MODELS, names_file
from tutti.records.json_lines import to_json
from tutti.run.config import or_listed, synonyms

_NO_OPTIONS: Final = {
    "--model": "the model is the first word, as in 'tutti train tabular --data churn.csv'",
    "--quiet": "send the output to a file: > out.txt",
}
"""What takes the place of options that people look for, in any command."""


class Command(ABC):
    """A command. Its docstring begins its help; the first line is in the help of `tutti`."""

    name: ClassVar[str]  # the word after `tutti`
    aim: ClassVar[str]  # the help of `tutti` groups commands by their aims
    example: ClassVar[str]  # a command to paste; it ends the help
    own_words: ClassVar[bool] = False  # the words after the first one without a dash are for another program

    def define(self, parser: Parser) -> None:
        """Add the options to the parser."""
        return

    @abstractmethod
    def run(self, words: Words) -> int:
        """Do the work, and return the exit code."""

    def parser(self) -> Parser:
        """Return the parser of the options."""
        about, epilog = inspect.cleandoc(self.__doc__ or ""), f"example:\n  {self.example}"
        parser = Parser(prog=f"tutti {self.name}", description=about, epilog=epilog)
        self.define(parser)
        return parser

    def __call__(self, words: Sequence[str]) -> int:
        """Parse the words after the command's name, and run it."""
        parser = self.parser()
        if not {"-h", "--help"}.isdisjoint(words[:1] if self.own_words else words):
            if "strategy" in parser.fields:
                explain_strategy(parser, words)
            print(parser.format_help(every="all" in words), end="")
            return 0
        return self.run(self.parse(words, parser))

    def parse(self, words: Sequence[str], parser: Parser) -> Words:
        """Return the parsed words, or raise with the nearest known ones."""
        rest, dotted = (words, {}) if self.own_words else split_dotted(words, parser.dotted)
        parsed, unknown = parser.parse_known_args(rest)
        strange = [word for word in unknown if word.startswith("-")] or unknown
        if strange:
            name = strange[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            explains = f"{parser.explains()}."
            if kind == "argument":
                quoted = ""
                if Path(name).is_file():
                    quoted = f"Data go with --data {name}; quote a pattern, as in --data 'train-*.h5'. "
                raise UnknownName(kind, name, (), quoted + explains)
            of_parts = [flag for field in parser.dotted for flag in flags_of_parts(field, words)]
            if name in _NO_OPTIONS:
                raise BadOption(f"unknown option '{name}'; {_NO_OPTIONS[name]}")
            known = [*parser.flags(), *of_parts]
            same = [flag for flag in of_parts if name == f"--{flag.partition('.')[2]}"]
            stems = tuple(f"{stem_of(field)}." for field in parser.dotted)
            same += [flag for flag in synonyms(name) if flag in known or flag.startswith(stems)]
            if same:
                meant = or_listed(list(dict.fromkeys(same)))
                raise BadOption(f"unknown option '{name}'; did you mean {meant}? {explains}")
            raise UnknownName(kind, name, known, explains)
        if (group := getattr(parsed, "group_by", None)) is not None:
            dotted.setdefault("data_options", {})["group"] = group
        given = {name: value for name, value in vars(parsed).items() if name in parser.fields}
        own = {name: value for name, value in vars(parsed).items() if name not in given}
        model = given.get("model", "")
        if Path(model).is_file() and not (model in MODELS or names_object(model) or names_file(model)):
            raise BadOption(
                f"'{model}' is a file, and no model; data come after one: tutti {self.name} tabular --data "
                f"{shlex.quote(model)}"
            )
        return Words([self.name, *words], argparse.Namespace(**own), given, dotted)


def explain_strategy(parser: Parser, words: Sequence[str]) -> None:
    """Add the options of the strategy that `--strategy` names to the help."""
    find = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    find.add_argument("--strategy", nargs="?")
    name = find.parse_known_args(words)[0].strategy
    if name is None:
        return
    from tutti.strategies import named

    kind = named(name)
    group = parser.add_argument_group(
        f"options of strategy {kind.name}", None if fields(kind) else "it has none"
    )
    for field in fields(kind):
        text = f"{field.metadata.get('help', 'no description')} (default: {field.default})"
        key = f"--strategy.{field.name.replace('_', '-')}"
        group.add_argument(key, metavar="VALUE", help=text.replace("%", "%%"))


def print_page(write: Callable[[], Path], folder: Path) -> None:
    """Write a page and print its path, or how to get the page."""
    try:
        print(f"report: {write()}", flush=True)
    except BadRunFolder:
        raise
    except UserError as error:
        print(f"tutti: warning: {error}; then run 'tutti report {folder}'", file=sys.stderr, flush=True)


def stopped(why: str, folder: Path) -> int:
    """Print how to continue a command that was stopped; return its exit code."""
    print(f"stopped: {why}; continue with the same command and --resume --out {shlex.quote(str(folder))}")
    return EXIT_INTERRUPTED


def write_json(path: str | Path | None, record: dict[str, Any]) -> None:
    """Write a record as indented JSON, if a path is given."""
    if path is not None:
        Path(path).write_text(to_json(record, indent=2) + "\n", encoding="utf-8")


def writable(path: Path, option: str) -> Path:
    """Return the path, or raise if the file cannot be written."""
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise BadOption(f"cannot write {option} {path}: {error.strerror}; name another file") from error
    return path
