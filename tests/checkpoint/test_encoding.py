"""A state in parts that can be written, and back."""

from __future__ import annotations

import json

import pytest
import torch

from tutti.checkpoint.encoding import decode, encode
from tutti.state import Held, State, TensorPiece


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_come_back(dtype: torch.dtype) -> None:
    values = torch.randn(4, dtype=dtype)
    # Two paths that are spelled alike.
    shared = {"a": {"b": values}, "a/b": values.conj()}
    encoded = encode(State(joint=Held([TensorPiece("w", 0, values, (4,))]), shared=shared), rank=0)
    encoded.header()
    state = decode(json.loads(encoded.head), encoded.tensors)
    assert torch.equal(state.joint.pieces[0].values, values)
    assert torch.equal(state.shared["a"]["b"], values)
    assert torch.equal(state.shared["a/b"], values.conj())
