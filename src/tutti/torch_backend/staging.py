"""Contiguous CPU tensors for any tensors: themselves if possible, else copies that are written back."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from tutti.torch_backend.errors import Unusable


class Staging:
    """The contiguous CPU tensors that one operation works on, and their originals.

    Contiguous tensors on the CPU are worked on in place. All others are copied at once, those of an
    accelerator into pinned host memory.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor, torch.cuda.Stream | None]] = []

    def take(self, tensor: Tensor, *, read: bool = True, write: bool = True) -> Tensor:
        """Return the elements of a tensor, of any shape, as a contiguous vector on the CPU.

        Complex numbers become pairs of real ones. `read` is whether the values are needed, `write` whether
        `write_back` writes them. Unusable: the tensor is sparse, or on a device without memory.
        """
        tensor = tensor.data
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_cpu and tensor.layout is torch.strided:
            if tensor.is_contiguous():
                return tensor.view(-1)
        elif tensor.device.type == "meta" or tensor.layout is not torch.strided:
            what = "sparse" if tensor.layout is not torch.strided else f"on the device {tensor.device}"
            raise Unusable(
                f"a tensor of shape {tuple(tensor.shape)} is {what}; give a dense tensor that is on the CPU "
                "or on an accelerator"
            )
        pinned = not tensor.is_cpu and tensor.device.type == "cuda"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        if read:
            copy.copy_(tensor)
        if write:
            self._copies.append((tensor, copy, torch.cuda.current_stream(tensor.device) if pinned else None))
        return copy.view(-1)

    def write_back(self) -> None:
        """Write the copies back into their tensors."""
        for tensor, copy, stream in self._copies:
            # This may be another thread, and the caller's stream may still use the tensor.
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                tensor.copy_(copy)
        self._copies.clear()

    @property
    def copied(self) -> bool:
        """Return whether `write_back` has anything to do."""
        return bool(self._copies)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be used in place, in its shape: a quick test before `Staging`."""
    return (
        tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_complex()
    )
