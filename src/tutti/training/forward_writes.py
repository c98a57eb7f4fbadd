"""What becomes of a forward pass that writes weights which are trained.

On one worker a layer that rewrites its weight in forward, as `nn.Embedding(max_norm=...)` does with the rows
that it looks up, is a rule of its own beside the optimizer. Of workers that make one update together each
would apply it once more, for its own samples, and where they see one copy, while the others read it.

A layer may also replace its weight: `self.weight.data = torch.renorm(self.weight.data, ...)`, as those of
EEGNet do. The new tensor is none that anybody trains, so its values go to where the weight was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter
from typing import Final

from torch import Tensor, nn

from tutti.checksum import checksum
from tutti.errors import BadModel
from tutti.replica import Replica

_version: Final = attrgetter("_version")

_LOOKS: Final = 1000
"""How many times as long as the sums of one side take the next comparison is waited for."""


class ForwardWrites:
    """Looks after the trained weights while the model computes.

    Torch counts the writes to a tensor, but for those through `.data`, such as a limit that is not reached at
    first: the values are compared as often as that takes two thousandths of the time.

    Args:
        replica: the model.
        refuses: whether the forward pass may only read them.
    """

    def __init__(self, replica: Replica, *, refuses: bool) -> None:
        self._replica, self._refuses = replica, refuses
        self._compares_at = 0.0
        self._parameters = list(replica.names)
        self._places = [parameter.data for parameter in self._parameters]
        self._addresses = self._addresses_now()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let a forward pass be made.

        Raises:
            BadModel: it has written a weight, and may not; or has replaced one by another kind of tensor.
        """
        self._bring_back()  # An evaluation may have replaced some.
        began, before = perf_counter(), self._writes()
        compares = self._refuses and began >= self._compares_at
        sums = self._sums() if compares else []
        took = perf_counter() - began
        yield
        self._refuse_differing(before, self._writes())
        if compares:
            self._refuse_differing(sums, self._sums())
            self._compares_at = perf_counter() + _LOOKS * took
        self._bring_back()

    def _bring_back(self) -> None:
        """Have the weights that were replaced where they were, with their new values."""
        now = self._addresses_now()
        if now == self._addresses:
            return
        if self._refuses:
            self._refuse_differing(self._addresses, now)
        for parameter, place, there, address in zip(
            self._parameters, self._places, self._addresses, now, strict=True
        ):
            if there != address:
                if (parameter.shape, parameter.dtype) != (place.shape, place.dtype):
                    raise BadModel(
                        f"the model's forward replaces its weight '{self._replica.names[parameter]}', "
                        f"{_said(place)}, by another kind: {_said(parameter)}; give it as it was"
                    )
                place.copy_(parameter.data)
                parameter.data = place

    def _addresses_now(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._parameters)]

    def _writes(self) -> list[int]:
        """How often each weight was written to; none if that does not matter."""
        return [*map(_version, self._parameters)] if self._refuses else []

    def _sums(self) -> list[int]:
        """The checksums of the values."""
        return [checksum(one.detach().cpu()) for one in self._parameters]

    def _refuse_differing(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Refuse the model if a figure of a weight is another one than before."""
        if before == now:
            return
        parameter = next(
            p for p, one, other in zip(self._parameters, before, now, strict=True) if one != other
        )
        name = self._replica.names[parameter]
        layer = self._replica.module.get_submodule(name.rpartition(".")[0])
        norm = max_norm_of(layer)
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
