"""A state in parts that can be written, and back."""

from __future__ import annotations

import json

import pytest
import torch

from tutti.checkpoint.encoding import decode, encode
from tutti.state import LocalState, State, TensorPiece


def test_complex_tensors_come_back() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    # Two paths that are spelled alike.
    shared = {"a": {"b": values}, "a/b": values.conj()}
    encoded = encode(State(joint=LocalState([TensorPiece("w", 0, values, (4,))]), shared=shared), rank=0)
    encoded.header()
    state = decode(json.loads(encoded.head), encoded.tensors)
    assert torch.equal(state.joint.pieces[0].values, values)
    assert torch.equal(state.shared["a"]["b"], values)
    assert torch.equal(state.shared["a/b"], values.conj())


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TypeError, match="the state has a object under 'own/a/0/b'"):
        encode(State(own={"a": [{"b": object()}]}), rank=0)
