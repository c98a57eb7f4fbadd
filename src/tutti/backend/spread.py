"""The collectives and messages of ranks on several hosts, over MPI: the same operations as `Rows` has.

All that MPI does here is to move bytes; sums are formed as inside a host, in rank order, each element by one
rank. So every dtype and every operation is the same with and without MPI.

    rank 0   give slice 1 │ sum slice 0 │ give slice 0      before each: all ranks tell each other what they
    rank 1   give slice 0 │ sum slice 1 │ give slice 1      call, and who does not can be named

Nothing here blocks: requests are begun, and asked after whenever the generator is run.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from tutti.backend.failures import Mismatch, RankLost, Unusable
from tutti.comm.base import ANY, cut
from tutti.comm.calls import BARRIER, Call, Kind, agree_on_lengths, check_sum, disagreement
from tutti.comm.messages import Receiving
from tutti.comm.mpi import MpiGroup
from tutti.comm.reductions import Reduction
from tutti.comm.rings import as_bytes
from tutti.comm.roll_call import Steps

PIECE: Final = 64 << 20
"""Bytes of a vector that are summed at once: what is received for it needs as much memory again."""

SMALL: Final = 8 << 10
"""Bytes up to which every rank gets everything and sums all of it."""

_CALLS: Final = 0
_VECTORS: Final = 1
"""The tags, on the communicator for collectives, of what is called, and of the vectors that follow."""


class Spread:
    """One group's ranks on several hosts, as one of them sees it.

    Args:
        mpi: two MPI communicators of the group's ranks, one for collectives and one for messages.
        rank: this process's number in the group.
        names: what the group's ranks are called in errors: their numbers in the job.
    """

    def __init__(self, mpi: MpiGroup, rank: int, names: Sequence[int]) -> None:
        self.rank, self.size, self._names = rank, len(names), tuple(names)
        self._mpi = mpi
        self._others = [(rank + step) % self.size for step in range(1, self.size)]
        self._missing: list[int] = []
        self._receiving: list[Receiving] = []

    def absent(self) -> list[int]:
        """The ranks that have not come where this one waits."""
        return self._missing

    def _finish(self, *requests: Any) -> Steps:
        try:
            for request in requests:
                while not request.Test():
                    yield False
        except self._mpi.error as error:
            raise RankLost([], f"MPI says: {error}") from error

    def _meet(self, call: Call) -> Steps:
        """Tell the others what is called here, and hear what they call."""
        mpi, mine = self._mpi.collectives, numpy.array([call])
        words = numpy.zeros(self.size, numpy.int64)
        coming = {other: mpi.Irecv(words[other : other + 1], other, _CALLS) for other in self._others}
        going = [mpi.Isend(mine, other, _CALLS) for other in self._others]
        self._missing = list(coming)
        for other, request in coming.items():
            yield from self._finish(request)
            self._missing.remove(other)
        yield from self._finish(*going)
        for other in self._others:
            if words[other] != call:
                theirs = Call(int(words[other]))
                raise Mismatch(disagreement(self._names[self.rank], call, self._names[other], theirs))

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Steps:
        """Give each rank its vector, and take one from each."""
        mpi = self._mpi.collectives
        incoming[self.rank].copy_(outgoing[self.rank])
        coming = [(other, as_bytes(incoming[other])) for other in self._others if len(incoming[other])]
        going = [(other, as_bytes(outgoing[other])) for other in self._others if len(outgoing[other])]
        requests = [mpi.Irecv(vector.numpy(), other, _VECTORS) for other, vector in coming]
        requests += [mpi.Isend(vector.numpy(), other, _VECTORS) for other, vector in going]
        yield from self._finish(*requests)

    def _share(self, vector: Tensor, outputs: Sequence[Tensor]) -> Steps:
        """Give each rank the same vector, and take one from each."""
        yield from self._swap([vector] * self.size, outputs)

    def barrier(self) -> Steps:
        """Wait until every rank has come here."""
        yield from self._meet(BARRIER)

    # --- reductions

    def all_reduce(self, vector: Tensor, way: Reduction) -> Steps:
        """Overwrite `vector` on every rank with what the ranks' vectors make together."""
        yield from self._meet(Call.of(Kind.ALL_REDUCE, vector.dtype, vector.numel(), reduction=way.number))
        if vector.nbytes <= SMALL:
            found = [torch.empty_like(vector) for _ in range(self.size)]
            yield from self._share(vector, found)
            way.fold(found, vector)
            return
        for piece in torch.split(vector, PIECE // vector.itemsize):
            slices = cut(len(piece), self.size)
            parts = [piece[place] for place in slices]
            yield from self._reduce_parts(parts, parts[self.rank], way)
            yield from self._share(parts[self.rank].clone(), parts)

    def _reduce_parts(self, parts: Sequence[Tensor], output: Tensor, way: Reduction) -> Steps:
        found = [torch.empty_like(output) for _ in range(self.size)]
        yield from self._swap(parts, found)
        if len(output):
            way.fold(found, output)

    def reduce(self, vector: Tensor, way: Reduction, root: int) -> Steps:
        """Overwrite `vector` on rank `root` with what the ranks' vectors make together."""
        yield from self._meet(
            Call.of(Kind.REDUCE, vector.dtype, vector.numel(), reduction=way.number, root=root)
        )
        for piece in torch.split(vector, PIECE // vector.itemsize):
            nothing = piece[:0]
            outgoing = [piece if other == root else nothing for other in range(self.size)]
            at_root = self.rank == root
            found = [torch.empty_like(piece) if at_root else nothing for _ in range(self.size)]
            # What this rank has for itself goes nowhere.
            found[self.rank] = torch.empty_like(outgoing[self.rank])
            yield from self._swap(outgoing, found)
            if at_root:
                way.fold(found, piece)

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, way: Reduction) -> Steps:
        """Overwrite `output` with what the ranks' vectors for this rank make together."""
        lengths = [len(vector) for vector in inputs]
        yield from self._meet(
            Call.of(
                Kind.REDUCE_SCATTER,
                output.dtype,
                sum(lengths),
                reduction=way.number,
                root=check_sum(lengths),
            )
        )
        yield from self._reduce_parts(inputs, output, way)

    # --- moves

    def broadcast(self, vector: Tensor, root: int) -> Steps:
        """Overwrite `vector` on every rank with that of rank `root`."""
        yield from self._meet(Call.of(Kind.BROADCAST, vector.dtype, vector.numel(), root=root))
        if len(vector):
            yield from self._finish(self._mpi.collectives.Ibcast(as_bytes(vector).numpy(), root))

    def all_gather(self, vector: Tensor, outputs: Sequence[Tensor]) -> Steps:
        """Overwrite `outputs` with the ranks' vectors, which may differ in length."""
        lengths = [len(output) for output in outputs]
        yield from self._meet(Call.of(Kind.ALL_GATHER, vector.dtype, sum(lengths), root=check_sum(lengths)))
        yield from self._share(vector, outputs)

    def gather(self, vector: Tensor, outputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite `outputs` on rank `root` with the ranks' vectors, which are of one length."""
        yield from self._meet(Call.of(Kind.GATHER, vector.dtype, vector.numel(), root=root))
        nothing = vector[:0]
        outgoing = [vector if other == root else nothing for other in range(self.size)]
        yield from self._swap(outgoing, outputs or [nothing] * self.size)

    def scatter(self, vector: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite `vector` with what rank `root` has for this rank in `inputs`, all of one length."""
        yield from self._meet(Call.of(Kind.SCATTER, vector.dtype, vector.numel(), root=root))
        nothing = vector[:0]
        incoming = [vector if other == root else nothing for other in range(self.size)]
        outgoing = inputs or [nothing] * self.size
        yield from self._swap(outgoing, incoming)

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Steps:
        """Overwrite `outputs` with what each rank has for this one; lengths are as the ranks agree."""
        yield from self._meet(Call.of(Kind.ALL_TO_ALL, inputs[0].dtype))
        mine = torch.tensor([len(one) for one in (*inputs, *outputs)], device="cpu")
        table = [torch.empty_like(mine) for _ in range(self.size)]
        yield from self._share(mine, table)
        agree_on_lengths([row.tolist() for row in table], self._names, Mismatch)
        yield from self._swap(inputs, outputs)

    # --- messages

    def send(self, vector: Tensor, to: int, tag: int) -> Steps:
        """Send `vector`; it may be overwritten at the end. Messages to one rank keep their order."""
        self._check_tag(tag)
        yield from self._finish(self._mpi.messages.Isend(as_bytes(vector).numpy(), to, tag))

    def recv(self, vector: Tensor, receiving: Receiving) -> Generator[bool, None, None]:
        """Overwrite `vector` with the next message that `receiving` asks for.

        Raises:
            Mismatch: the message has another length than `vector`. It is lost.
        """
        self._check_tag(receiving.tag)
        self._receiving.append(receiving)
        try:
            while (found := self._probe(receiving)) is None:
                yield False
            status, message = found
            receiving.sender, nbytes = status.Get_source(), status.Get_count(self._mpi.byte)
            if nbytes != vector.nbytes:
                yield from self._finish(message.Irecv(numpy.empty(nbytes, numpy.uint8)))
                raise Mismatch(
                    f"rank {self._names[receiving.sender]} sent {nbytes} bytes with tag {receiving.tag}, but "
                    f"the tensor to receive it in rank {self._names[self.rank]} has {vector.nbytes}; receive "
                    "it into a tensor like the one that is sent"
                )
            yield from self._finish(message.Irecv(as_bytes(vector).numpy()))
        finally:
            self._receiving.remove(receiving)

    def _probe(self, receiving: Receiving) -> tuple[Any, Any] | None:
        for earlier in self._receiving:
            if earlier is receiving:
                break
            if earlier.competes(receiving):
                return None
        source = self._mpi.any_source if receiving.source == ANY else receiving.source
        status = self._mpi.status()
        try:
            message = self._mpi.messages.Improbe(source, receiving.tag, status)
        except self._mpi.error as error:
            raise RankLost([], f"MPI says: {error}") from error
        return None if message is None else (status, message)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._mpi.largest_tag:
            raise Unusable(
                f"the tag of a message between hosts is {tag}; give one of 0 to {self._mpi.largest_tag}"
            )
