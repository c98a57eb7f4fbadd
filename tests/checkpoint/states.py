"""States to save, which look the same at every number of ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tutti.comm.base import cut
from tutti.state import LocalState, Saved, State, TensorPiece, whole_piece

LENGTH = 1000


def whole(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(LENGTH, generator=generator, dtype=torch.float64).to(dtype)


def state_of(rank: int, ranks: int, step: int) -> State:
    """A state with everything that a state can have; `step` is in all of its values."""
    part = cut(LENGTH, ranks)[rank]
    joint = LocalState(
        [
            TensorPiece("weights/a/b", part.start, whole(step)[part], (10, 100)),
            TensorPiece(
                "optimizer/a/b/exp_avg", part.start, whole(step + 1, torch.bfloat16)[part], (10, 100)
            ),
            whole_piece("optimizer/a/b/step", torch.tensor(float(step))),
        ],
        {"optimizer/c/step": step},
    )
    alone = LocalState(
        [whole_piece("own_weights/a", torch.full((2, 3, 4, 5), step).to(memory_format=torch.channels_last))],
        {"rank": rank},
    )
    shared = {
        "texts": ["ü", "$tensor", "\x1b[1m\n\ud800"],
        "numbers": [step, 0.1, True, None, math.inf, 1 << 70],
        "$odd": {"$tensor": 3},
        "generator": torch.full((5,), step, dtype=torch.uint8),
    }
    own = {"rank": rank, "empty": torch.empty(0, 3), "flags": torch.tensor([True, False, rank == 1])}
    return State(joint, alone, shared, own)


def check(saved: Saved, rank: int, ranks: int, step: int, before: int) -> None:
    """Raise unless this is what `before` ranks left after a step."""
    tensors, numbers = saved.joint.tensors, saved.joint.numbers
    assert torch.equal(tensors["weights/a/b"], whole(step).view(10, 100))
    assert torch.equal(tensors["optimizer/a/b/exp_avg"], whole(step + 1, torch.bfloat16).view(10, 100))
    assert tensors["optimizer/a/b/step"].item() == step
    assert tensors["optimizer/a/b/step"].shape == ()
    assert numbers == {"optimizer/c/step": step}
    assert saved.shared["texts"] == ["ü", "$tensor", "\x1b[1m\n\ud800"]
    assert saved.shared["numbers"] == [step, 0.1, True, None, math.inf, 1 << 70]
    assert saved.shared["$odd"] == {"$tensor": 3}
    assert saved.shared["generator"].tolist() == [step] * 5
    if ranks != before:
        assert saved.alone is None
        assert saved.own is None
        return
    assert saved.alone is not None
    assert saved.alone.numbers == {"rank": rank}
    own = saved.alone.tensors["own_weights/a"]
    assert torch.equal(own, torch.full((2, 3, 4, 5), step))
    assert own.is_contiguous(memory_format=torch.channels_last)
    assert saved.own is not None
    assert saved.own["rank"] == rank
    assert saved.own["empty"].shape == (0, 3)
    assert saved.own["flags"].tolist() == [True, False, rank == 1]
