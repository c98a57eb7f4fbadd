"""A rank's state as a safetensors file, and a JSON head that describes its tensors.

    rank-00000.safetensors    "joint/weights/0.weight[0:600]"     a vector of 600 elements
                              "own/generator"                     a tensor in its shape
    rank-00000.json           {"joint": {"pieces": [["weights/0.weight", 0, 600, [20, 50], "rows"]], ...},
                               "own": {"generator": {"$tensor": "own/generator"}}, ...}

Nothing in them is code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor

from tutti.records.json_lines import Json
from tutti.state import LocalState, State, TensorPiece, Values

_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes as safetensors calls them."""

_MARK: Final = "$"
"""The first character of a key that says what kind of value stands there."""

_HEADER_ALIGNMENT: Final = 64


@dataclass
class EncodedState:
    """A rank's state in parts to write."""

    head: bytes = b""  # JSON
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by their names, in order; they are live

    def header(self) -> bytes:
        """Return the beginning of the safetensors file, before the tensors."""
        entries, at = {}, 0
        for name, tensor in self.tensors.items():
            entries[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def file_size(self) -> int:
        """The size of the safetensors file."""
        return len(self.header()) + sum(tensor.nbytes for tensor in self.tensors.values())


def encode(state: State, rank: int) -> EncodedState:
    """Encode a rank's state; `shared` counts only on rank 0."""
    encoder = _Encoder()
    head = {
        "joint": encoder.held(state.joint, "joint"),
        "alone": encoder.held(state.alone, "alone"),
        "shared": encoder.value(state.shared if rank == 0 else {}, "shared"),
        "own": encoder.value(state.own, "own"),
    }
    # The largest elements come first, so that every tensor lies at a multiple of the size of its elements.
    ordered = sorted(encoder.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    return EncodedState(json.dumps(head, separators=(",", ":"), allow_nan=False).encode(), dict(ordered))


def decode(head: Json, tensors: Mapping[str, Tensor]) -> State:
    """Return the state, which shares the tensors' memory. KeyError, TypeError, ValueError: it is damaged."""
    return State(
        _decoded_held(head["joint"], "joint", tensors),
        _decoded_held(head["alone"], "alone", tensors),
        _decoded(head["shared"], tensors),
        _decoded(head["own"], tensors),
    )


class _Encoder:
    """The collector of all tensors of a state, by the names that they get."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def held(self, held: LocalState, part: str) -> Json:
        """Encode tensors and numbers that belong to parameters."""
        pieces = []
        for piece in held.pieces:
            name = _name_of(part, piece.name, piece.start, piece.stop)
            if name not in self.tensors:
                self._keep(name, piece.values)
                pieces.append([piece.name, piece.start, piece.stop, list(piece.shape), piece.order])
        return {"pieces": pieces, "numbers": self.value(held.numbers, f"{part}/numbers")}

    def value(self, value: object, path: str) -> object:
        """Encode a tree of values."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, list | tuple):
            # Whole numbers as they are: generators of random numbers have lists of hundreds of them.
            return [
                item if type(item) is int else self.value(item, f"{path}/{number}")
                for number, item in enumerate(value)
            ]
        if isinstance(value, Tensor):
            # A path may be written in two ways: {"a": {"b": ...}} and {"a/b": ...}.
            name = f"{path}#{len(self.tensors)}" if path in self.tensors else path
            self._keep(name, value)
            return {"$tensor": name}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            encoded = {key: self.value(item, f"{path}/{key}") for key, item in value.items()}
            return {"$dict": encoded} if any(key.startswith(_MARK) for key in value) else encoded
        raise TypeError(
            f"the state has a {type(value).__name__} under '{path}'; it can have None, truth values, "
            "numbers, texts, tensors, and lists and dictionaries of them whose keys are texts"
        )

    def _keep(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"the state has a tensor of {tensor.dtype} under '{name}', which safetensors does not know; "
                "keep it as another type, such as views of its parts"
            )
        self.tensors[name] = tensor.detach()


def _name_of(part: str, name: str, start: int, stop: int) -> str:
    return f"{part}/{name}[{start}:{stop}]"


def _decoded_held(head: Json, part: str, tensors: Mapping[str, Tensor]) -> LocalState:
    pieces = [
        TensorPiece(name, start, tensors[_name_of(part, name, start, stop)], tuple(shape), order)
        for name, start, stop, shape, order in head["pieces"]
    ]
    return LocalState(pieces, cast("Values", _decoded(head["numbers"], tensors)))


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(key, item)] = value.items()
        if key == "$tensor":
            return tensors[item]
        if key == "$float":
            return float(item)
        if key == "$dict":
            return {name: _decoded(one, tensors) for name, one in item.items()}
    return {key: _decoded(item, tensors) for key, item in value.items()}
