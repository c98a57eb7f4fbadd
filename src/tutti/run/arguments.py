"""Options as a caller in Python writes them.

Messages spell options as the command line does, `--batch-size 24`: most are written where nobody knows who
has called. `tutti.train` has them spelled anew, `batch_size=24`, before its caller sees them; so have the
functions for a user's own loop, which takes objects, `strategy=tutti.Local(momentum=0)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import partial
from typing import Any, Final

from tutti.data import BUILT_IN
from tutti.errors import UserError
from tutti.model_parallel.layout import DATA, WAYS
from tutti.optim.named import OPTIMIZERS
from tutti.records.pipeline import SCHEDULES
from tutti.run.config import TrainConfig, type_name
from tutti.strategies import STRATEGIES, Strategy
from tutti.training.loggers import optional_loggers
from tutti.training.losses import LOSSES

SHORT: Final = {"n": "workers"}
"""Options of the command line with a letter of their own."""

FIELDS: Final[dict[str, Field[Any] | None]] = {f.name: f for f in fields(TrainConfig)} | {
    "trace": None,
    "resume": None,
}
"""The arguments of `tutti.train` that the command line has too."""

_WAYS: Final = "|".join([DATA, *WAYS])

_NAMES: Final[dict[str, str]] = {
    "strategy": "|".join(STRATEGIES),
    "parallel": rf"(?:{_WAYS})(?:=\d+)?(?:,(?:{_WAYS})(?:=\d+)?)*",
    "optimizer": "|".join(OPTIMIZERS),
    "loss": "|".join(LOSSES),
    "data": "|".join(BUILT_IN),
    "log": "|".join(optional_loggers()),
    "hosts": r"\w+:\d+(?:,\w+:\d+)*",
    "resume": "auto",
}
"""The values of texts that messages name, besides the choices of a field."""

_OPTION: Final = re.compile(
    r"(?<![\w-])-(?:-(?P<name>[a-z][a-z-]*)(?:\.(?P<key>[a-z][a-z_-]*))?|(?P<short>n)(?= \d))"
)
_NUMBER: Final = r"-?\d[\d.e+-]*(?<![.])|true|false"
_QUOTED: Final = re.compile(r"'(-(?:-[a-z]|n )[^']*)'")


_OBJECT: Final = re.compile(
    rf"(?P<quote>'?)(?<![\w-])(?:(?:--strategy (?P<of>{'|'.join(STRATEGIES)}) )?"
    r"--strategy\.(?P<key>[a-z][a-z_-]*) (?P<value>[\w.+-]*\w)"
    rf"|--strategy (?P<strategy>{'|'.join(STRATEGIES)})\b"
    rf"|--optimizer (?P<optimizer>{'|'.join(OPTIMIZERS)})\b)(?P=quote)"
)
"""Parts that a loop has as objects: a strategy by options of it or by name, or an optimizer."""


@contextmanager
def as_arguments(strategy: Strategy | None = None) -> Iterator[None]:
    """Spell the options in a `UserError` as arguments of `tutti.train`, or as objects for a loop of the user.

    Args:
        strategy: that of a loop, whose options are meant where no other is named; None: `tutti.train`'s.
    """
    try:
        yield
    except UserError as error:
        anew = in_python if strategy is None else partial(in_own_loop, strategy=type(strategy))
        error.args = tuple(anew(one) if isinstance(one, str) else one for one in error.args)
        raise


def in_own_loop(message: str, strategy: type[Strategy]) -> str:
    """A message with strategies and optimizers as objects; options of `tutti run` stay as they are.

    Args:
        message: as the command line has it.
        strategy: of the loop.
    """

    def as_object(found: re.Match[str]) -> str:
        if found["optimizer"]:
            optimizer = OPTIMIZERS[found["optimizer"]]
            ours = optimizer.__module__.startswith("tutti.")
            return f"{optimizer.__module__ if ours else 'torch.optim'}.{optimizer.__name__}"
        if found["strategy"]:
            return f"strategy='{found['strategy']}'"
        kind = STRATEGIES[found["of"]] if found["of"] else strategy
        package = "tutti." if kind in STRATEGIES.values() else ""
        return (
            f"strategy={package}{kind.__name__}({found['key'].replace('-', '_')}={_literal(found['value'])})"
        )

    return _OBJECT.sub(as_object, message)


def in_python(message: str) -> str:
    """A message with every option spelled as an argument of `tutti.train`; other words stay as they are."""
    found, at = [], 0
    message = _QUOTED.sub(lambda quoted: quoted[1] if _is_known(quoted[1]) else quoted[0], message)
    for option in _OPTION.finditer(message):
        name, key = _name(option), option["key"]
        if name not in FIELDS or option.start() < at:
            continue
        value = re.compile(rf" ({_values(name, key)})(?![\w=])").match(message, option.end())
        found += [message[at : option.start()], _argument(name, key, value[1] if value else None)]
        at = value.end() if value else option.end()
    return "".join([*found, message[at:]])


def _is_known(words: str) -> bool:
    option = _OPTION.match(words)
    return option is not None and _name(option) in FIELDS


def _name(option: re.Match[str]) -> str:
    return SHORT.get(option["short"]) or option["name"].replace("-", "_")


def _values(name: str, key: str | None) -> str:
    """Return the pattern of a value after an option, as against a word of the sentence."""
    if key == "columns":
        return r"[^\s;]+"
    if key is not None:
        words = r"worker|drop|mean|true|NAME|A,B,\.\.\.|HEIGHT,WIDTH|file\.py:function"
        return rf"{_NUMBER}|N|{'|'.join(SCHEDULES)}|{words}"
    field = FIELDS[name]
    choices = field.metadata["choices"] if field is not None else ()
    names = [*choices, *filter(None, [_NAMES.get(name)])]
    return "|".join([_NUMBER, *names])


def _argument(name: str, key: str | None, value: str | None) -> str:
    if key is not None:
        table, key = f"{name}_options", key.replace("-", "_")
        return f"{table}['{key}']" if value is None else f"{table}={{'{key}': {_literal(value)}}}"
    field = FIELDS[name]
    text = field is not None and type_name(field) == "str" and name != "workers"
    return name if value is None else f"{name}={repr(value) if text else _literal(value)}"


def _literal(value: str) -> str:
    known = {"true": "True", "false": "False"}
    return known.get(value) or (value if re.fullmatch(rf"{_NUMBER}|N", value) else repr(value))
