"""The check that a forward pass only reads the weights that workers train together.

On one worker a layer that rewrites its weight in forward, as `nn.Embedding(max_norm=...)` does with the rows
that it looks up, is a rule of its own beside the optimizer. Of workers that make one update together each
would apply it once more, for its own samples, and where they see one copy, while the others read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Final

from torch import Tensor, nn

from tutti.checksum import checksum
from tutti.errors import BadModel
from tutti.replica import Replica

_version: Final = attrgetter("_version")


class ForwardWrites:
    """Refuses a model that writes a trained weight while it computes.

    Torch counts the writes to a tensor, but for those through `.data`: at first the values are compared.

    Args:
        replica: the model.
    """

    def __init__(self, replica: Replica) -> None:
        self._module = replica.module
        self._names = replica.names | {parameter: name for name, parameter in replica.scattered}
        # Those that are split over ranks are written by whatever gathers them.
        self._parameters = [one for one in self._names if type(one.data) is Tensor]
        self._compares = True

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Let a forward pass be made.

        Raises:
            BadModel: it has written a weight.
        """
        before, sums = self._writes(), self._sums()
        yield
        after = self._writes()
        for earlier, now in ((before, after), (sums, self._sums())):
            if now != earlier:
                self._refuse(
                    next(p for p, b, a in zip(self._parameters, earlier, now, strict=True) if a != b)
                )
        self._compares = False

    def _writes(self) -> list[int]:
        return [*map(_version, self._parameters)]

    def _sums(self) -> list[int]:
        """The checksums of the values; none if they are not compared any more."""
        return [checksum(one.detach().cpu()) for one in self._parameters] if self._compares else []

    def _refuse(self, parameter: nn.Parameter) -> None:
        name = self._names[parameter]
        layer = self._module.get_submodule(name.rpartition(".")[0])
        lookup = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
        by = f", by max_norm={layer.max_norm}" if lookup else ""
        raise BadModel(
            f"the model's forward writes its weight '{name}'{by}: workers that make one update together "
            "would each do so again; do it in a callback after each step, train with one worker (-n 1), or "
            "choose a strategy whose workers have weights of their own, such as --strategy local"
        )
