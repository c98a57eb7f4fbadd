"""The output among all that a model returns: of it losses and metrics by name are computed.

    a tensor                          itself
    an object with `logits`           these, as of Hugging Face's models
    a dict                            its "logits", or else its "output"
    a tuple or a list                 its first element

A loss of the user's may ask for everything; see `tutti.training.losses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from tutti.errors import BadModel

NAMES: Final = ("logits", "output")
"""The keys of the output in a dict, the first that is there."""


def the_output(outputs: object) -> Tensor:
    """Return the output among all that a model returned.

    Raises:
        BadModel: nobody can know which it is.
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = next((outputs[name] for name in NAMES if name in outputs), None)
    elif isinstance(getattr(outputs, NAMES[0], None), Tensor):
        found = getattr(outputs, NAMES[0])
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if isinstance(found, Tensor):
        return found
    raise BadModel(
        f"the model returns {_said(outputs)}, and which tensor of it is the output is not known; return a "
        "tensor, a tuple that begins with it, or a dict or an object that has it as 'logits' or 'output'"
    )


def _said(outputs: object) -> str:
    if isinstance(outputs, Mapping):
        return f"a dict of {', '.join(map(str, outputs)) or 'nothing'}"
    if isinstance(outputs, tuple | list) and outputs:
        return f"a {type(outputs).__name__} that begins with a {type(outputs[0]).__name__}"
    return f"a {type(outputs).__name__}"
