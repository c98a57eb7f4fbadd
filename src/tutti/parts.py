"""The parts that a configuration names, without importing their packages, which import torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.errors import BadOption, UnknownName
from tutti.registry import PartFile, Registry

FORMATS: Final[Registry[Any]] = Registry("tutti.data.formats", "data file format")
DATA_SETS: Final[Registry[Any]] = Registry(
    "tutti.data.builtin",
    "data set",
    lambda: (
        f"Or give a path ({', '.join(FORMATS)}, a folder), 'package.module:factory' or 'file.py:factory'."
    ),
)
LOSSES: Final[Registry[Any]] = Registry(
    "tutti.training.losses", "loss", "Or give package.module:function or file.py:function."
)
METRICS: Final[Registry[Any]] = Registry(
    "tutti.training.metrics",
    "metric",
    "Of the K largest scores there is topK. Or give package.module:function, such as "
    "sklearn.metrics:matthews_corrcoef, or file.py:function.",
)
AUGMENTATIONS: Final[Registry[Any]] = Registry(
    "tutti.training.augmentations", "augmentation", "A transform of your own is 'file.py:function'."
)
STRATEGIES: Final[Registry[Any]] = Registry(
    "tutti.strategies", "strategy", "One of your own is named as file.py:Class or package.module:Class."
)


class ClassesWithTorch(Registry[Any]):
    """Classes of tutti in a package, and of torch.optim, which are found in its files."""

    def __init__(
        self,
        package: str,
        kind: str,
        file: str,  # of torch.optim
        pattern: str,  # finds the name of a class there, and the file of its definition if that is another
        unusable: Collection[str],  # names that are known, but not listed
        spelled: Callable[[str], str] = str,  # gives the name for users
    ) -> None:
        super().__init__(package, kind)
        self._file, self._pattern, self._unusable, self._spelled = file, pattern, unusable, spelled

    @override
    def __iter__(self) -> Iterator[str]:
        return (name for name in self._places if name not in self._unusable)

    @cached_property
    @override
    def _places(self) -> dict[str, PartFile]:
        torch = importlib.util.find_spec("torch")  # torch is not imported.
        assert torch is not None, "it is required"
        folder = Path(str(torch.origin)).parent / "optim"
        text, found = (folder / self._file).read_text(encoding="utf-8"), {}
        for match in re.finditer(self._pattern, text, re.MULTILINE):
            file = match.groupdict().get("file", self._file.removesuffix(".py"))
            place = PartFile(folder / f"{file}.py", f"torch.optim.{file}", match["name"])
            found[self._spelled(match["name"])] = place
        return found | super()._places

    @override
    def options(self, name: str) -> tuple[str, ...]:
        """Return the names of all parameters but the first, which the run gives."""
        made = next(
            one
            for one in self._places[name].definition.body
            if isinstance(one, ast.FunctionDef) and one.name == "__init__"
        )
        return tuple(one.arg for one in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs))[2:]


OPTIMIZERS: Final = ClassesWithTorch(
    "tutti.optim.optimizers",
    "optimizer",
    "__init__.py",
    r"^from torch\.optim\.(?P<file>\w+) import (?P<name>(?!Optimizer\b)[A-Z]\w*) as ",
    ("lbfgs", "sparseadam"),
    str.lower,
)
"""Every optimizer of `torch.optim` and ours, by lower-case name."""

_UNUSABLE: Final = ("SequentialLR", "ChainedScheduler")
"""Schedulers made from other ones, which no option can describe."""

SCHEDULES: Final = ClassesWithTorch(
    "tutti.optim.schedulers",
    "schedule",
    "lr_scheduler.py",
    r"^class (?P<name>[A-Z]\w*)\(LRScheduler\)",
    _UNUSABLE,
)
"""Every scheduler of `torch.optim.lr_scheduler` by its own name, and ours."""

CONSTANT: Final = "constant"
"""The name of no schedule."""

_ALIASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "cosine": ("CosineAnnealingLR", {}),
    "linear": ("LinearLR", {"start_factor": 1.0, "end_factor": 0.0}),
    "warm": ("CosineAnnealingWarmRestarts", {"T_mult": 2}),
    "plateau": ("ReduceLROnPlateau", {}),
    CONSTANT: (CONSTANT, {}),
    "none": (CONSTANT, {}),
}
"""Shorter names, and the options that they stand for. A class's own name may be written without its "LR"."""

_WHOLE: Final = ("constantlr", "linearlr")
"""Names whose "LR" must stay: "constant" and "linear" are names of tutti's own."""


def find_schedule(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name in `SCHEDULES`, or `CONSTANT`, for a name in any spelling, and its options."""
    every = _ALIASES | {full: (full, {}) for full in SCHEDULES}
    for known, found in every.items():
        if _plain(name) == _plain(known):
            return found
    if _plain(name) in map(_plain, _UNUSABLE):
        raise BadOption(
            f"schedule '{name}' cannot be used: it is made from other schedulers; use another, such as "
            "one_cycle or cosine, or package.module:Class for one of your own"
        )
    raise UnknownName("schedule", name, [*every, "one_cycle"])


def _plain(name: str) -> str:
    """Return the name in one spelling: "OneCycleLR", "one_cycle" and "one-cycle-lr" become "onecycle"."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return plain if plain in _WHOLE else plain.removesuffix("lr")
