"""A model to be pickled, with its numbers as NumPy arrays.

`joblib.dump` compresses and maps arrays, and pickles of them need no particular device to be read.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

OF_NUMPY: Final = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
"""The types of numbers that NumPy has as well; tensors of others are pickled as torch does it."""


@dataclass(frozen=True)
class PickledModule:
    """A model taken apart.

    Attributes:
        structure: the pickled model, without what is in its tensors; a notebook's classes are in it.
        arrays: what is in its tensors.
    """

    structure: bytes
    arrays: list[NDArray[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> PickledModule:
        """Take a model apart."""
        file = io.BytesIO()
        pickler = _ModulePickler(file)
        pickler.dump(module)
        return cls(file.getvalue(), [one.detach().cpu().numpy() for one in pickler.tensors])

    def load(self) -> nn.Module:
        """Put the model together."""
        module: nn.Module = _Unpickler(self).load()
        return module


class _ModulePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a model without what is in its tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        """The parts that were left out."""
        self._places: dict[int, int] = {}

    @override
    def persistent_id(self, obj: object) -> int | None:
        # A parameter is pickled as such, with the tensor in it.
        if type(obj) is not Tensor or obj.is_meta or obj.layout != torch.strided or obj.dtype not in OF_NUMPY:
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._places[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, parts: PickledModule) -> None:
        super().__init__(io.BytesIO(parts.structure))
        # Copies: arrays that are mapped from a file cannot be written to.
        self._tensors = [torch.tensor(array) for array in parts.arrays]

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[int(pid)]
