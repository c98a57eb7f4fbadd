"""Options of the command line, made from the fields of `TrainConfig`."""

from __future__ import annotations

import argparse
import json
import re
from argparse import BooleanOptionalAction
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from textwrap import fill
from types import MappingProxyType
from typing import Any, Final, NoReturn

from typing_extensions import override

from tutti.data.tables import OF_ALL, TABLE_OPTIONS
from tutti.errors import BadOption, UnknownName
from tutti.run.config import PARTS, Options, Rate, TrainConfig, flag, help_of, type_name, with_defaults
from tutti.training.intervals import AUTO

DOTTED = tuple(f.name for f in fields(TrainConfig) if type_name(f) == "Options")
"""The fields that take --NAME.KEY value."""

GOAL: Final = "accuracy on the validation part, 0 to 1"
"""The help of --goal."""

_METAVARS: Final = {
    "N": "workers",
    "SHARE": "validation test",
    "RATE": "lr",
    "RULE": "goal average sampling class_weights",
    "FIGURE": "monitor",
    "DURATION": "time_limit hang_timeout",
    "INTERVAL": "checkpoint",
    "DATA": "data",
    "FILE": "weights",
    "FILE:N": "split",
    "FOLDER": "out",
    "HOSTS": "hosts",
    "LAYOUT": "parallel",
    "NAMES": "augment metrics callbacks log",
}
"""The values of fields in the help; others depend on the type: N, X or NAME."""

MANY: Final = 30
"""With more options, the help has groups, and only '--help all' shows the rarer ones."""

GROUPS: Final = {
    "data and model": "data data_options validation test group_by split sampling augment augment_options "
    "model_options weights",
    "length of the run": "epochs steps patience monitor goal restore_best average time_limit validate",
    "learning": "batch_size accumulate optimizer optimizer_options lr schedule schedule_options loss "
    "loss_options class_weights metrics clip_norm clip_value batch_norm skip_nonfinite seed",
    "ranks and speed": "workers hosts threads strategy strategy_options parallel parallel_options servers "
    "levels server_period balance plan budget device cuda_graph precision layout on_failure hang_timeout",
    "run folder": "out checkpoint keep resume config trust predictions log trace callbacks dry_run json",
}
"""The headings of the help, with fields of `TrainConfig` and options of commands."""

COMMON: Final = (
    "data data_options validation test model_options epochs patience monitor goal batch_size optimizer lr "
    "schedule loss metrics seed workers hosts strategy device precision out checkpoint resume"
)
"""The options in `GROUPS` that most people need."""

_NEGATIVE = re.compile(r"(-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf)$")
"""Negative numbers; argparse would take -1e-3 for an option."""

_POINTED = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?")
"""Numbers with a point that JSON does not know, such as .9"""


class HelpFormatter(argparse.HelpFormatter):
    """Fits paragraphs to the terminal, except those with indented lines, which are commands.

    `hidden` are the options to leave out.
    """

    def __init__(self, hidden: Collection[argparse.Action] = (), **settings: Any) -> None:
        super().__init__(max_help_position=30, **settings)
        self._hidden = hidden

    @override
    def add_argument(self, action: argparse.Action) -> None:
        if action not in self._hidden:
            super().add_argument(action)

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(one if "\n " in one else fill(one, width) for one in paragraphs)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `BadOption` instead of printing the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **settings)
        self._negative_number_matcher = _NEGATIVE
        self.register("type", int, partial(_parsed, int, "a whole number"))
        self.register("type", float, partial(_parsed, float, "a number"))
        self.register("type", _rate, partial(_parsed, _rate, "a number or auto"))
        self.register("type", accuracy, partial(_parsed, accuracy, "an accuracy, such as 0.97"))
        self.fields: list[str] = []  # the fields of `TrainConfig` with an option
        self.dotted: list[str] = []  # the fields with options --NAME.KEY, which `split_dotted` takes out
        self._unwritten: dict[argparse.Action, Callable[[], str]] = {}
        self._groups = {title: self.add_argument_group(title) for title in GROUPS}

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise BadOption(f"{message}; {self.explains()}")

    def explains(self) -> str:
        """Return which command explains every option."""
        return f"'{self.prog} --help{' all' if self._rare() else ''}' explains every option"

    def write_help(self, every: bool = True) -> None:
        """Write the help of every argument, or its first line. This reads the files of the parts."""
        for action, text in self._unwritten.items():
            first, *more = text().split("\n")
            action.help = "; ".join([first, *(more if every else ())])

    @override
    def format_help(self, every: bool = True) -> str:
        """Return the help of every option, or of the common ones with a hint to the rest."""
        self.write_help(every)
        rare = self._rare()
        if rare:
            words = [one for one in self._actions if not one.option_strings]
            shown = [str(one.metavar) if one.nargs is None else f"[{one.metavar}]" for one in words]
            self.usage = " ".join([self.prog, "[OPTIONS]", *shown])
        self.formatter_class = partial(HelpFormatter, [] if every else rare)
        more = f"\n'{self.prog} --help all' explains {len(rare)} more options.\n"
        return super().format_help() + ("" if every or not rare else more)

    def _rare(self) -> list[argparse.Action]:
        """Return the options that a short help leaves out; there are none if the parser has few options."""
        if len(self.flags()) <= MANY:
            return []
        grouped = [one for group in self._groups.values() for one in group._group_actions]
        return [one for one in grouped if one.dest not in COMMON.split()]

    def _group_of(self, dest: str) -> argparse._ActionsContainer:
        return next((self._groups[title] for title, names in GROUPS.items() if dest in names.split()), self)

    def flags(self) -> list[str]:
        """Return every visible option."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [flag for action in shown for flag in action.option_strings]

    def option(
        self, flags: str, help: str, metavar: str | None = None, default: Any = None, **settings: Any
    ) -> None:
        """Add an option of the command; without `metavar` and choices it is a flag."""
        if choices := settings.get("choices"):
            metavar = "{" + ",".join(choices) + "}"
        if metavar is None:
            settings |= {"action": "store_true"}
        else:
            settings |= {"metavar": metavar, "default": default}
        shown = f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
        names = flags.split(", ")
        group = self._group_of(settings.get("dest", names[-1].lstrip("-").replace("-", "_")))
        group.add_argument(*names, help=help + (shown if default else ""), **settings)

    def model(self, required: bool = False, help: str = "as for 'tutti train'") -> None:
        """Add the model of a training run, the word without a dash."""
        self.fields.append("model")
        optional: dict[str, Any] = {} if required else {"nargs": "?", "default": argparse.SUPPRESS}
        self.add_argument("model", metavar="MODEL", help=help, **optional)

    def config_options(
        self,
        leave_out: Collection[str] = (),
        only: Collection[str] = (),  # by default all other fields
        defaults: Mapping[str, str] = MappingProxyType({}),  # for the help, instead of those of the fields
    ) -> None:
        """Add an option for each field of `TrainConfig` except the model."""
        kept = [f for f in fields(TrainConfig) if f.name not in {*leave_out, "model"}]
        kept = [f for f in kept if f.name in only or not only]
        self.fields += [f.name for f in kept]
        self.dotted = [f.name for f in kept if f.name in DOTTED]
        kinds: dict[str, Any] = {"int": int, "float": float, "Rate": _rate, "Goal": _goal}
        for f in kept:
            group, default = self._group_of(f.name), defaults.get(f.name)
            if f.name in DOTTED:
                name, dest = stem_of(f.name) + ".KEY", f.name
                made = group.add_argument(name, dest=dest, metavar="VALUE", default=argparse.SUPPRESS)
            elif type_name(f) == "bool":
                made = group.add_argument(
                    flag(f.name), action=BooleanOptionalAction, default=argparse.SUPPRESS
                )
            else:
                choices = f.metadata["choices"]
                made = group.add_argument(
                    *(["-n", "--workers"] if f.name == "workers" else [flag(f.name)]),
                    dest=f.name,
                    type=kinds.get(type_name(f), str),
                    default=argparse.SUPPRESS,
                    metavar=("{" + ",".join(choices) + "}") if choices else _metavar(f),
                )
            self._unwritten[made] = partial(_help, f, default)

    def group_option(self, where: str) -> None:
        """Add the option with the groups of the samples; `Command.parse` makes it an option of the data."""
        self.option(
            "--group-by",
            f"keep samples of one group in one {where}: the name of a column of a table, which is then no "
            "input, or of an array of an HDF5 or NPZ file",
            "NAME",
        )

    def trained_options(self, use: str, parts: Sequence[str], device: str) -> None:
        """Add the options of a command that uses a trained network: its run, other weights, and data."""
        place = "a run folder, one of its checkpoints, or the folder of an ensemble"
        self.add_argument("place", metavar="RUN", help=place)
        part = f"the part of the data to {use} (default: test, or all of other data without parts)"
        self.option("--part", part, choices=parts)
        weights = "other weights than the final ones: a checkpoint, or a file that 'tutti export' reads"
        self.option("--weights", weights, "PLACE")
        self.trust_option()
        kept = ("data", "data_options", "workers", "hosts", "threads", "device")
        self.config_options(only=kept, defaults={"data": "that of the run", "device": device})

    def trust_option(self) -> None:
        """Add the option that lets code named by a configuration file run."""
        self.option("--trust", "run the code that a configuration file names")


def _rate(text: str) -> Rate:
    return text if text == AUTO else float(text)


def accuracy(text: str) -> float:
    """Return the number of a goal, such as "0.97", "accuracy 0.97" or "accuracy >= 0.97"."""
    return float(re.sub(r"(val(idation)?[ _])?accuracy\s*>?=?", "", text))


def _goal(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parsed(kind: Callable[[str], Rate], words: str, text: str) -> Rate:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not {words}") from None


def _metavar(f: Field[Any]) -> str:
    usual = {"int": "N", "float": "X"}.get(type_name(f), "NAME")
    return next((word for word, names in _METAVARS.items() if f.name in names.split()), usual)


def _help(f: Field[Any], default: str | None = None) -> str:
    text = help_of(f).replace("%", "%%")
    if default is not None or f.default not in (None, MISSING, False):
        text = f"{text} (default: {default or f.default})"
    return text


def stem_of(field: str) -> str:
    """Return the flag of a field of options up to the dot: --model for model_options."""
    return flag(field).removesuffix("-options")


def flags_of_parts(field: str, words: Sequence[str]) -> list[str]:
    """Return the options, such as --model.hidden, of the parts that the words name."""
    of = field.removesuffix("_options")
    if of == "data":
        return [f"--data.{option}" for option in (*OF_ALL, *TABLE_OPTIONS)]
    known = PARTS.get(of, ())
    named = [name for word in words for name in word.rpartition("=")[2].split(",") if name in known]
    keys = (key.replace("_", "-") for name in named for key in PARTS[of].options(name))
    return list(dict.fromkeys(f"{stem_of(field)}.{key}" for key in keys))


def split_dotted(
    arguments: Sequence[str], dotted: Sequence[str] = DOTTED
) -> tuple[list[str], dict[str, Options]]:
    """Split off options of parts, such as {"model_options": {"hidden": 8}}; return the other words first."""
    stems = {stem_of(field): field for field in dotted}
    rest: list[str] = []
    options: dict[str, Options] = {}
    words = iter(arguments)
    for word in words:
        stem, dot, key = word.partition("=")[0].partition(".")
        if not (dot and stem.startswith("--") and key):
            rest.append(word)
            continue
        if stem not in stems:
            raise UnknownName("option", f"{stem}.{key}", [f"{known}.{key}" for known in stems])
        _, given, text = word.partition("=")
        if not given:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise BadOption(f"{stem}.{key} has no value; give one, such as {stem}.{key} 1")
            text = following
        options.setdefault(stems[stem], {})[key.replace("-", "_")] = parse_value(text)
    return rest, options


def parse_value(text: str) -> Any:
    """Parse the value of a part's option: JSON, a number such as .9, a list with commas, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if _POINTED.fullmatch(text):
        return float(text)
    if "," in text:
        return [parse_value(item.strip()) for item in text.split(",") if item.strip()]
    return {"True": True, "False": False, "None": None}.get(text, text)


def words_of(text: str) -> list[str]:
    """Return the words between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers_of(text: str, flag: str, example: str) -> list[int]:
    """Return the whole numbers between commas."""
    words = words_of(text)
    if not all(word.isdecimal() for word in words):
        raise BadOption(f"{flag} is '{text}'; give whole numbers with commas, such as {example}")
    return [int(word) for word in words]


def sweep_of(given: Sequence[str]) -> dict[str, list[Any]]:
    """Parse options with their values, such as "batch_size=32,64"."""
    found: dict[str, list[Any]] = {}
    for text in given:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise BadOption(f"--sweep is '{text}'; give an option and its values, such as batch_size=32,64")
        found[field_name(key)] = [parse_value(value.strip()) for value in values.split(",")]
    return found


def field_name(text: str) -> str:
    """Return the field of an option: batch_size for --batch-size."""
    return text.strip().removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Words:
    """The parsed words of a command."""

    line: list[str]  # all words, from the name of the command on
    own: argparse.Namespace  # the options of the command
    given: dict[str, Any]  # fields of a `TrainConfig`
    dotted: dict[str, Options]  # options of parts, by field

    @property
    def other_data(self) -> bool:
        """True if the words name data."""
        return "data" in self.given or bool(self.dotted)

    def config(self, base: TrainConfig | None = None, **decided: Any) -> TrainConfig:
        """Return the configuration: `base`, changed by the words and by the fields that are `decided`."""
        given = {**self.given, **decided}
        config = TrainConfig.from_json(with_defaults(given)) if base is None else base.changed(given)
        values = config.as_json()
        for part, options in self.dotted.items():
            values[part] = {**values.get(part, {}), **options}
        return TrainConfig.from_json(values)


def command_words(config: TrainConfig) -> list[str]:
    """Return the words after `tutti train` that make this configuration, without defaults."""
    words: list[str] = []
    plain = TrainConfig.from_json(with_defaults({"model": config.model}))
    for f in fields(TrainConfig):
        value = getattr(config, f.name)
        if f.name in DOTTED:
            for key, item in value.items():
                words += [f"{stem_of(f.name)}.{key.replace('_', '-')}", _text_of(item)]
        elif f.name == "model":
            words = [value, *words]
        elif value is True:
            words.append(flag(f.name))
        elif value is not None and value != getattr(plain, f.name):
            words += ["-n" if f.name == "workers" else flag(f.name), str(value)]
    return words


def _text_of(value: object) -> str:
    """Return the text that `parse_value` reads as this value."""
    if isinstance(value, str):
        return value if parse_value(value) == value else json.dumps(value)
    return json.dumps(value)
