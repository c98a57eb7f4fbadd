"""The collectives of a process group under all of torch's names for them."""

# torch's stubs list each of these twice, as it is called from C++ and as it may be called from Python.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tutti.comm.mpi.collectives import HierarchicalCollectives
from tutti.comm.reductions import REDUCTIONS, SUM, Reduction
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.collectives import HostCollectives
from tutti.torch_backend.errors import Unusable
from tutti.torch_backend.progress import ProgressEngine
from tutti.torch_backend.sparse import all_reduce_sparse
from tutti.torch_backend.staging import Staging, is_plain
from tutti.torch_backend.work import Operation

Tensors = Sequence[Tensor] | Tensor


class GroupCollectives(ProcessGroup):
    """The collectives of a group. Inputs must have as many elements on all ranks; shapes may differ."""

    _rank: int
    _size: int
    _transport: HostCollectives | HierarchicalCollectives
    _short_all_reduce: Callable[[Tensor, Reduction], Steps | None]
    _short = -1
    _progress: ProgressEngine

    def _run(
        self, what: str, steps: Sequence[Steps], outputs: Sequence[Tensor], staging: Staging, options: Any
    ) -> Operation | None:
        one = steps[0] if len(steps) == 1 and not staging.copied else chain(steps, staging)
        return self._progress.collective(one, outputs, what, asynchronous(options))

    # --- reductions

    def allreduce(self, tensors: Tensors, options: Any = None, timeout: Any = None) -> Operation | None:
        """Overwrite each tensor on every rank with the reduction of the ranks' tensors."""
        several = listed(tensors)
        if len(several) == 1 and is_plain(several[0]):
            tensor = several[0]
            reduction, wanted = reduction_of(options), asynchronous(options)
            if tensor.nbytes <= self._short:
                return self._progress.immediate(
                    self._short_all_reduce, tensor, reduction, "all_reduce", wanted
                )
            steps = self._transport.all_reduce(tensor, reduction)
            return self._progress.collective(steps, several, "all_reduce", wanted)
        return self._all_reduce_all(several, options)

    def allreduce_coalesced(
        self, tensors: Tensors, options: Any = None, timeout: Any = None
    ) -> Operation | None:
        """Overwrite each tensor on every rank with the reduction of the ranks' tensors."""
        return self._all_reduce_all(listed(tensors), options)

    def _all_reduce_all(self, several: Sequence[Tensor], options: Any) -> Operation | None:
        reduction, staging, steps = reduction_of(options), Staging(), []
        for tensor in several:
            if tensor.layout is torch.sparse_coo:
                steps.append(all_reduce_sparse(self._transport, tensor, reduction))
                continue
            steps.append(self._transport.all_reduce(staging.take(tensor), reduction))
        return self._run("all_reduce", steps, several, staging, options)

    def reduce(self, tensors: Tensors, options: Any = None, op: Any = None) -> Operation | None:
        """Overwrite each tensor on the root with the reduction of the ranks' tensors."""
        several, staging, root = listed(tensors), Staging(), root_of(options)
        reduction = reduction_of(options if op is None else op)
        steps = []
        for tensor in several:
            staged = staging.take(tensor, write=root == self._rank)
            if root != self._rank:
                staged = staged.clone()
            steps.append(self._transport.all_reduce(staged, reduction))
        return self._run("reduce", steps, several, staging, options)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Any], options: Any = None, timeout: Any = None
    ) -> Operation | None:
        """Overwrite this rank's output with the reduction of the ranks' inputs for it."""
        several, staging = listed(outputs), Staging()
        lists = inputs if inputs and not isinstance(inputs[0], Tensor) else [inputs]
        steps = [
            self._reduce_scatter(
                staging.take(output, read=False), [staging.take(one, write=False) for one in parts], options
            )
            for output, parts in zip(several, lists, strict=True)
        ]
        return self._run("reduce_scatter", steps, several, staging, options)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any = None) -> Operation | None:
        """Overwrite this rank's output with the reduction of the ranks' parts for it."""
        return self.reduce_scatter_single_coalesced([output], [source], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Operation | None:
        """Run several `reduce_scatter_single` as one operation."""
        staging, steps = Staging(), []
        for output, source in zip(outputs, inputs, strict=True):
            vector, target = staging.take(source, write=False), staging.take(output, read=False)
            check_whole("reduce_scatter", target, vector, self._size)
            parts = torch.split(vector, len(target) or 1)
            steps.append(self._reduce_scatter(target, parts, options))
        return self._run("reduce_scatter_single", steps, outputs, staging, options)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], options: Any) -> Steps:
        parts = parts_of(parts, self._size)
        self._check_parts("reduce_scatter", parts, output)
        return self._transport.reduce_scatter(parts, output, reduction_of(options))

    # --- moves

    def broadcast(self, tensors: Tensors, options: Any = None, timeout: Any = None) -> Operation | None:
        """Overwrite each tensor on every rank with the root's."""
        several, staging, root = listed(tensors), Staging(), root_of(options)
        steps = [
            self._transport.broadcast(
                staging.take(tensor, read=root == self._rank, write=root != self._rank), root
            )
            for tensor in several
        ]
        return self._run("broadcast", steps, several, staging, options)

    def allgather(
        self, outputs: Sequence[Any], inputs: Tensors, options: Any = None, timeout: Any = None
    ) -> Operation | None:
        """Overwrite each list of outputs with the ranks' inputs, which may differ in size."""
        lists = outputs if outputs and not isinstance(outputs[0], Tensor) else [outputs]
        staging = Staging()
        steps = [
            self._all_gather(
                staging.take(source, write=False), [staging.take(out, read=False) for out in places]
            )
            for source, places in zip(listed(inputs), lists, strict=True)
        ]
        return self._run("all_gather", steps, [out for places in lists for out in places], staging, options)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None
    ) -> Operation | None:
        """Overwrite `outputs[rank]` with the inputs of each rank."""
        return self.allgather([list(places) for places in zip(*outputs, strict=True)], inputs, options)

    def all_gather_single(self, output: Tensor, source: Tensor, options: Any = None) -> Operation | None:
        """Overwrite the output with the ranks' inputs, one after the other."""
        return self.all_gather_single_coalesced([output], [source], options)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Operation | None:
        """Run several `all_gather_single` as one operation."""
        staging, steps = Staging(), []
        for output, source in zip(outputs, inputs, strict=True):
            staged, target = staging.take(source, write=False), staging.take(output, read=False)
            check_whole("all_gather", staged, target, self._size)
            parts = torch.split(target, len(staged) or 1)
            steps.append(self._all_gather(staged, parts_of(parts, self._size)))
        return self._run("all_gather_single", steps, outputs, staging, options)

    def _all_gather(self, staged: Tensor, places: Sequence[Tensor]) -> Steps:
        self._check_parts("all_gather", places, staged)
        return self._transport.all_gather(staged, places)

    def _check_parts(self, what: str, parts: Sequence[Tensor], own: Tensor) -> None:
        if len(parts) != self._size or len(parts[self._rank]) != own.numel():
            raise Unusable(
                f"{what} got tensors of {[len(part) for part in parts]} elements for {self._size} ranks and "
                f"one of {own.numel()} for rank {self._rank}'s; give one for each rank, of that length"
            )

    def gather(
        self, outputs: Sequence[Any], inputs: Tensors, options: Any = None, timeout: Any = None
    ) -> Operation | None:
        """Overwrite the root's outputs with the ranks' inputs."""
        staging, root, (source,) = Staging(), root_of(options), listed(inputs)
        lists = list(outputs[0] if outputs and not isinstance(outputs[0], Tensor) else outputs)
        staged = staging.take(source, write=False)
        places = [staging.take(out, read=False) for out in lists] if root == self._rank else []
        self._check_root_lists("gather", staged, places, root)
        return self._run("gather", [self._transport.gather(staged, places, root)], lists, staging, options)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Any], options: Any = None, timeout: Any = None
    ) -> Operation | None:
        """Overwrite each rank's output with the root's input for it."""
        staging, root, (output,) = Staging(), root_of(options), listed(outputs)
        lists = inputs[0] if inputs and not isinstance(inputs[0], Tensor) else inputs
        vector = staging.take(output, read=False)
        sources = [staging.take(one, write=False) for one in lists] if root == self._rank else []
        self._check_root_lists("scatter", vector, sources, root)
        return self._run(
            "scatter", [self._transport.scatter(vector, sources, root)], [output], staging, options
        )

    def _check_root_lists(self, what: str, own: Tensor, lists: Sequence[Tensor], root: int) -> None:
        if root == self._rank and [len(one) for one in lists] != [own.numel()] * self._size:
            raise Unusable(
                f"{what} got tensors of {[len(one) for one in lists]} elements in its root, rank {root}; "
                f"give {self._size} of {own.numel()}, one for each rank"
            )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        options: Any = None,
    ) -> Operation | None:
        """Overwrite the output with each rank's part for this one, in rank order.

        The splits are the number of rows from and to each rank; empty: all equal.
        """
        staging = Staging()
        steps = self._transport.all_to_all(
            self._split(staging.take(source, write=False), source, input_splits),
            self._split(staging.take(output, read=False), output, output_splits),
        )
        return self._run("all_to_all_single", [steps], [output], staging, options)

    def _split(self, vector: Tensor, tensor: Tensor, splits: Sequence[int]) -> Sequence[Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % self._size == 0:
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise Unusable(
                f"all_to_all cannot cut {rows} rows into {list(splits) or 'equal parts'} for {self._size} "
                "ranks; give one size for each rank, which add up to the rows"
            )
        return torch.split(vector, [rows and len(vector) // rows * split for split in splits])

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None, timeout: Any = None
    ) -> Operation | None:
        """Overwrite the outputs with each rank's input for this one."""
        if len(outputs) != self._size or len(inputs) != self._size:
            raise Unusable(
                f"all_to_all got {len(inputs)} inputs and {len(outputs)} outputs; give one of each for every "
                f"one of the {self._size} ranks"
            )
        staging = Staging()
        steps = self._transport.all_to_all(
            [staging.take(one, write=False) for one in inputs],
            [staging.take(one, read=False) for one in outputs],
        )
        return self._run("all_to_all", [steps], outputs, staging, options)


def chain(steps: Iterable[Steps], staging: Staging) -> Steps:
    """Run several operations one after the other; then write the copies back."""
    for each in steps:
        yield from each
    staging.write_back()


# --- the several forms in which torch's callers give arguments


def listed(tensors: Tensors) -> Sequence[Tensor]:
    """Return the tensors as a sequence, also for a single one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


# An instance equals the plain value that torch's enumeration has for it; the other way round it does not.
_BY_OP: Final[dict[Any, Reduction]] = {
    ReduceOp(getattr(ReduceOp, reduction.name.upper())): reduction for reduction in REDUCTIONS
}


def reduction_of(options: Any) -> Reduction:
    """Return the reduction in torch's options, or of a `ReduceOp`; by default a sum."""
    op = ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    if op == ReduceOp.SUM:
        return SUM
    if op not in _BY_OP:
        known = ", ".join(each.name.upper() for each in REDUCTIONS)
        raise Unusable(f"there is no reduce operation {op}; give one of ReduceOp.{known}")
    return _BY_OP[op]


def root_of(options: Any) -> int:
    """Return the root in torch's options, or a rank given directly; by default rank 0."""
    return int(getattr(options, "rootRank", options or 0))


def asynchronous(options: Any) -> bool:
    """Return whether the caller wants a work object; a caller without options does."""
    return bool(getattr(options, "asyncOp", True))


def check_whole(what: str, part: Tensor, whole: Tensor, size: int) -> None:
    """Raise Unusable unless a whole has one part for each rank."""
    if part.numel() * size != len(whole) or part.dtype != whole.dtype:
        raise Unusable(
            f"{what} got a part of {part.numel()} x {part.dtype} and a whole of {len(whole)} x {whole.dtype} "
            f"for {size} ranks; the whole must have {size} times as many elements, of the same dtype"
        )


def parts_of(parts: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """Return one part for each rank, also if the whole is empty."""
    return parts if len(parts) == size or any(map(len, parts)) else [parts[0]] * size
