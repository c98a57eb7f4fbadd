"""The built-in models, and models by name.

Nothing here imports torch before a model is built, so that the names can be listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tutti.errors import BadModel, BadOption
from tutti.load_object import call_with_options, takes_option
from tutti.registry import Registry

if TYPE_CHECKING:
    from torch import nn

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "tutti.models", "model", "A model of your own is 'package.module:factory' or 'file.py:factory'."
)
"""The factories of the built-in models. Each is called as `factory(shape, outputs, **options)`."""

__all__ = ["MODELS", "build"]


def build(
    spec: str | nn.Module | Callable[..., nn.Module],
    shape: tuple[int, ...],
    outputs: int,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build the model that `spec` names, for inputs of `shape`.

    Args:
        spec: a name in `MODELS`, `package.module:factory`, `file.py:factory`, a factory itself, or a module,
            which is taken as it is. A factory is called with the options, and with `shape=` and `outputs=`
            where it has parameters of these names.
        shape: of one input, without the batch, such as (1, 28, 28).
        outputs: the numbers that the model gives for one input: the number of classes, or of targets.
        options: of the model, by name.

    Raises:
        UnknownName: there is no such model, or it has no such option.
        BadOption: an option's value cannot be used, or the factory cannot be imported.
        BadModel: the model does not fit `shape`, or the factory returned something else than an `nn.Module`.
    """
    options = dict(options or {})
    given = {"shape": tuple(shape), "outputs": outputs}
    factory: object
    if isinstance(spec, str):
        factory = MODELS.load(spec)
    else:
        factory, spec = spec, getattr(spec, "__qualname__", type(spec).__name__)
    from torch import nn

    if isinstance(factory, nn.Module):
        if options:
            raise BadOption(
                f"model '{spec}' is built already, so its options ({', '.join(options)}) have no effect; "
                "leave them out, or name a function that builds it"
            )
        return factory
    for name in given.keys() & options.keys():
        raise BadOption(f"option '{name}' of model '{spec}' follows from the data; leave it out")
    taken = {name: value for name, value in given.items() if takes_option(factory, name)}
    module = call_with_options(factory, options, "model", spec, taken)
    if not isinstance(module, nn.Module):
        found = "nothing" if module is None else f"a {type(module).__name__}"
        raise BadModel(f"model '{spec}' returned {found}; it must return an nn.Module")
    return module
