"""Forward passes that write weights which are trained.

On one worker a layer that rewrites its weight in forward, as `nn.Embedding(max_norm=...)` does with the rows
that it looks up, is a rule of its own beside the optimizer. Workers that make one update together would each
apply it once more.

A layer may also replace its weight: `self.weight.data = torch.renorm(self.weight.data, ...)`, as those of
EEGNet do. The new tensor is none that anybody trains, so its values go to where the weight was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from tutti.errors import BadModel
from tutti.replica import Replica


class ForwardWrites:
    """Watches the trained weights while the model computes.

    Torch counts the writes to a tensor, but for those through `.data`, which are not seen.

    Args:
        replica: the model.
        refuses: whether the forward pass may only read them.
    """

    def __init__(self, replica: Replica, *, refuses: bool) -> None:
        self._replica, self._refuses = replica, refuses
        self._parameters = list(replica.names)
        self._places = [parameter.data for parameter in self._parameters]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make a forward pass.

        Raises:
            BadModel: it has written a weight, and may not; or has replaced one by another kind of tensor.
        """
        self._bring_back()  # An evaluation may have replaced some.
        before = [parameter._version for parameter in self._parameters]
        yield
        for parameter, version in zip(self._parameters, before, strict=True):
            if self._refuses and parameter._version != version:
                self._refuse(parameter)
        self._bring_back()

    def _bring_back(self) -> None:
        """Put weights that were replaced back to where they were, with their new values."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if parameter.data_ptr() == place.data_ptr():
                continue
            if self._refuses:
                self._refuse(parameter)
            if (parameter.shape, parameter.dtype) != (place.shape, place.dtype):
                raise BadModel(
                    f"the model's forward replaces its weight '{self._replica.names[parameter]}', "
                    f"{_said(place)}, by another kind: {_said(parameter)}; give it as it was"
                )
            place.copy_(parameter.data)
            parameter.data = place

    def _refuse(self, parameter: nn.Parameter) -> None:
        name = self._replica.names[parameter]
        norm = max_norm_of(self._replica.module.get_submodule(name.rpartition(".")[0]))
        by = "" if norm is None else f", by max_norm={norm}"
        raise BadModel(
            f"the model's forward writes its weight '{name}'{by}: workers that make one update together "
            "would each do so again; compute with a changed copy, as torch.nn.utils.parametrize does, train "
            "with one worker (-n 1), or choose a strategy whose workers have weights of their own, such as "
            "--strategy local"
        )


def max_norm_of(layer: nn.Module) -> float | None:
    """Return the norm to which a look-up shortens the rows of a table; None: it is no table, or has none."""
    return layer.max_norm if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else None


def _said(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
