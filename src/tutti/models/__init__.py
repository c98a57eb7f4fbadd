"""The built-in models, and models by name.

Nothing here imports torch before a model is built, so that the names can be listed at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from tutti.errors import BadModel, BadOption
from tutti.load_object import call_with_options, find_file, names_object, takes_option
from tutti.records.preparation import TableInputs
from tutti.records.texts import Shape, described, several
from tutti.registry import Registry

if TYPE_CHECKING:
    from torch import nn

FILES: Final[Registry[Callable[[Path, object], nn.Module]]] = Registry(
    "tutti.models.files", "kind of model file"
)
"""Readers of files that hold a whole model, by the end of their names: called as `read(path, shape)`."""


def names_file(spec: str) -> bool:
    """Return whether `spec` is the path of a file that holds a whole model, such as 'net.pt2'.

    Reading it may run code.
    """
    return "." in spec and not names_object(spec) and Path(spec).suffix in FILES


class Models(Registry[Callable[..., "nn.Module"]]):
    """The factories of the built-in models. Each is called as `factory(shape, outputs, **options)`."""

    @override
    def load(self, spec: str) -> object:
        """Return the factory called `spec`, the user's object, or the reader of a model's file."""
        if not names_file(spec):
            return super().load(spec)
        file = find_file(spec, spec, "model")

        def read(shape: object) -> nn.Module:
            return FILES[file.suffix](file, shape)

        return read

    @override
    def check(self, name: str) -> None:
        """Refuse an unknown name, or the path of a missing file, without importing a model.

        Raises:
            UnknownName: the message names the nearest.
            BadOption: there is no such file.
        """
        if names_file(name):
            find_file(name, name, "model")
        else:
            super().check(name)


MODELS: Final = Models(
    "tutti.models",
    "model",
    lambda: (
        "A model of your own is 'package.module:factory', 'file.py:factory', or a file with a whole model "
        f"({', '.join(f'*{kind}' for kind in FILES)})."
    ),
)

__all__ = ["FILES", "MODELS", "build", "names_file", "takes_table"]


def build(
    spec: str | nn.Module | Callable[..., nn.Module],
    shape: Shape,
    outputs: int,
    options: Mapping[str, Any] | None = None,
    table: TableInputs | None = None,
) -> nn.Module:
    """Build the model that `spec` names, for inputs of `shape`.

    Args:
        spec: a name in `MODELS`, `package.module:factory`, `file.py:factory`, a factory itself, or a module,
            which is returned as it is. A factory is called with the options, and with `shape=`, `outputs=`
            and `table=` where it has parameters of these names.
        shape: of one input, without the batch, such as (1, 28, 28); of several inputs the shape of each, by
            name or by position.
        outputs: the size of the model's output for one input: the number of classes, or of targets.
        options: of the model, by name.
        table: the inputs of a prepared table; None: the data are not one.

    Raises:
        UnknownName: there is no such model, or it has no such option.
        BadOption: an option's value cannot be used, or the factory cannot be imported.
        BadModel: the model does not fit `shape`, or the factory did not return an `nn.Module`.
    """
    options = dict(options or {})
    factory: object
    if isinstance(spec, str):
        factory = MODELS.load(spec)
    else:
        factory, spec = spec, getattr(spec, "__qualname__", type(spec).__name__)
    if several(shape) and factory in MODELS.values():
        raise BadModel(
            f"the model '{spec}' takes one input, and the data give each sample several: {described(shape)}; "
            "give a model of your own, such as file.py:Net, whose forward takes them"
        )
    from torch import nn

    _refuse_other_keras(factory)
    if isinstance(factory, nn.Module):
        if options:
            raise BadOption(
                f"model '{spec}' is built already, so its options ({', '.join(options)}) have no effect; "
                "leave them out, or name a function that builds it"
            )
        return factory
    sizes = shape if isinstance(shape, dict) else tuple(shape)
    module = _made(factory, spec, options, {"shape": sizes, "outputs": outputs, "table": table})
    _refuse_other_keras(module)
    if not isinstance(module, nn.Module):
        found = "nothing" if module is None else f"an object of type '{type(module).__name__}'"
        raise BadModel(f"model '{spec}' returned {found}; it must return an nn.Module")
    if "train" in vars(module) and hasattr(module, "graph"):
        # torch.export's raises an error instead.
        from tutti.models.files.exported import follow_mode

        follow_mode(module)
    return module


def takes_table(spec: object) -> bool:
    """Return whether a model, as `build` takes it, has a parameter for the inputs of a table."""
    return takes_option(MODELS.load(spec) if isinstance(spec, str) else spec, "table")


def _made(factory: object, spec: str, options: Mapping[str, Any], given: Mapping[str, object]) -> object:
    """Call a factory with the options, and with those facts about the data that it takes."""
    for name in given.keys() & options.keys():
        raise BadOption(f"option '{name}' of model '{spec}' follows from the data; leave it out")
    if "keras.src.utils.naming" in sys.modules:
        # Keras numbers a process's layers in their names, which must be equal in all processes.
        # (Its public `clear_session` would forget the user's settings, too.)
        sys.modules["keras.src.utils.naming"].reset_uids()
    taken = {name: value for name, value in given.items() if takes_option(factory, name)}
    return call_with_options(factory, options, "model", spec, taken)


def _refuse_other_keras(given: object) -> None:
    """Refuse a model of Keras that does not compute by torch."""
    if any(base.__module__ == "keras.src.models.model" for base in type(given).__mro__):
        from tutti.models.files.keras import refuse_other_backend

        refuse_other_backend(sys.modules["keras"].config.backend())
