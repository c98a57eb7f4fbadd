"""The collectives of ranks on several hosts: through shared memory inside each host, over MPI between them.

    host a   rank 0   sum slice 0 of a │ exchange with rank 2, sum slice 0 of a and b │ give slice 0 to rank 1
             rank 1   sum slice 1 of a │ exchange with rank 3, sum slice 1 of a and b │ give slice 1 to rank 0
    host b   rank 2   sum slice 0 of b │ exchange with rank 0, sum slice 0 of a and b │ give slice 0 to rank 3
             rank 3   sum slice 1 of b │ exchange with rank 1, sum slice 1 of a and b │ give slice 1 to rank 2

This is the hierarchical all-reduce: a sum crosses between two hosts once, not once for each of their ranks.
Where hosts have different numbers of ranks, there are as many slices as ranks on the smallest host.

MPI only moves bytes; sums are formed by the same code as inside a host, in the order of a
host's ranks and then of the hosts. So every dtype and every operation is the same with and without MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from tutti.comm.base import cut
from tutti.comm.mpi.group import Membership
from tutti.comm.mpi.transport import MpiRequests, Request
from tutti.comm.reductions import Reduction, rounds
from tutti.comm.shm.barrier import Call, Collective, Steps, agree_on_lengths
from tutti.comm.shm.collectives import HostCollectives
from tutti.errors import CallsDiffer

PIECE_BYTES: Final = 4 << 20
"""Bytes of a vector that hosts exchange at once: receiving them needs as much memory again."""

SHORT_BYTES: Final = 64 << 10
"""The most bytes that a host sends to others in one step."""

P = ParamSpec("P")
T = TypeVar("T")
Operation = Callable[Concatenate["HierarchicalCollectives", P], Generator[bool, None, T]]


def collective(operation: Operation[P, T]) -> Operation[P, T]:
    """Count the collectives begun, and those finished."""

    @wraps(operation)
    def counted(
        self: HierarchicalCollectives, /, *args: P.args, **kwargs: P.kwargs
    ) -> Generator[bool, None, T]:
        membership = self._membership
        membership.begun += 1
        try:
            result = yield from operation(self, *args, **kwargs)
        except CallsDiffer:
            membership.done += 1
            raise
        membership.done += 1
        return result

    return counted


class HierarchicalCollectives:
    """The collectives of a group whose ranks are on several hosts, in one of its ranks.

    Ranks of one host that call different things get an error. Between hosts nothing is compared: MPI keeps
    vectors in order.
    """

    def __init__(self, membership: Membership, rows: HostCollectives, hosts: Sequence[Sequence[int]]) -> None:
        self.rank, self.size = membership.rank, len(membership.global_ranks)
        self._membership, self._requests = membership, MpiRequests(membership, membership.mpi.collectives)
        self._rows, self._hosts = rows, hosts
        self._host = next(number for number, members in enumerate(hosts) if self.rank in members)
        self._here, self._lanes = hosts[self._host], min(map(len, hosts))
        self._lane = self._here.index(self.rank)

    def absent(self) -> list[int]:
        """Return the ranks that are not, or will never be, where this one waits."""
        early = self._membership.early()
        return early or [self._here[local] for local in self._rows.absent()] or self._requests.awaited

    def _is_short(self, vector: Tensor) -> bool:
        """Return whether a host sends all of a vector to every other host at once."""
        return vector.nbytes * (len(self._hosts) - 1) <= SHORT_BYTES

    @collective
    def barrier(self) -> Steps:
        """Wait until every rank has called this: on each host, then its first ranks for each other."""
        yield from self._rows.barrier()
        if not self._lane:
            leaders = [members[0] for members in self._hosts if members is not self._here]
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            incoming = {leader: torch.empty_like(token) for leader in leaders}
            yield from self._requests.exchange(dict.fromkeys(leaders, token), incoming)
        yield from self._rows.barrier()

    # --- reductions

    @collective
    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """Overwrite `tensor`, contiguous, on every rank with the reduction of the ranks' tensors."""
        vector = tensor.view(-1)
        # Floats of 16 bits are rounded only once, at the end.
        wide = vector.float() if rounds(vector.dtype) else vector
        for piece in torch.split(wide, PIECE_BYTES * self._lanes // wide.itemsize):
            parts = [piece[place] for place in cut(len(piece), self._lanes)]
            parts += [piece[:0]] * (len(self._here) - self._lanes)
            own = parts[self._lane]
            yield from self._fold_rows(parts, own, reduction)
            yield from self._fold_hosts(own, reduction)
            yield from self._share_rows(own, parts)
        if wide is not vector:
            vector.copy_(wide)

    def _fold_rows(self, parts: Sequence[Tensor], own: Tensor, reduction: Reduction) -> Steps:
        """Overwrite `own` with the reduction of this host's `parts` for this rank."""
        if len(self._here) > 1:
            yield from self._rows.reduce_scatter(parts, own, reduction.partial)
        else:
            own.copy_(parts[0])

    def _share_rows(self, own: Tensor, parts: Sequence[Tensor]) -> Steps:
        """Overwrite `parts` with `own` of each rank of this host."""
        if len(self._here) > 1:
            yield from self._rows.all_gather(own, parts)

    def _fold_hosts(self, own: Tensor, reduction: Reduction) -> Steps:
        """Overwrite `own` with the reduction over the ranks of this lane."""
        if not len(own):
            return
        partners = [members[self._lane] for members in self._hosts]
        others = [host for host in range(len(self._hosts)) if host != self._host]
        # Between two hosts both reduce all of it, which moves as few bytes and takes one step less.
        if len(others) == 1 or self._is_short(own):
            gathered = [
                own if host == self._host else torch.empty_like(own) for host in range(len(self._hosts))
            ]
            yield from self._requests.exchange(
                {partners[host]: own for host in others}, {partners[host]: gathered[host] for host in others}
            )
            # Only the first or the second may be the result, too.
            result = own if self._host < 2 else gathered[0]
            reduction.partial.fold(gathered, result)
            reduction.finish(result, self.size)
            if result is not own:
                own.copy_(result)
            return
        parts = [own[place] for place in cut(len(own), len(self._hosts))]
        mine = parts[self._host]
        gathered = [torch.empty_like(mine) for _ in self._hosts]
        gathered[self._host].copy_(mine)
        yield from self._requests.exchange(
            {partners[host]: parts[host] for host in others},
            {partners[host]: gathered[host] for host in others},
        )
        if len(mine):
            reduction.partial.fold(gathered, mine)
            reduction.finish(mine, self.size)
        yield from self._requests.exchange(
            {partners[host]: mine for host in others},
            {partners[host]: parts[host] for host in others},
        )

    @collective
    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction) -> Steps:
        """Overwrite `output` with the reduction of the ranks' vectors for this rank.

        A host's vectors for a rank of another host are summed by the rank that has the same place here, and
        travel as one vector.
        """
        if rounds(output.dtype):
            inputs = [vector.float() for vector in inputs]
        gathered = [torch.empty_like(inputs[self.rank]) for _ in self._hosts]
        sources = [members[self._lane % len(members)] for members in self._hosts]
        coming = {sources[host]: gathered[host] for host in range(len(self._hosts)) if host != self._host}
        requests: list[Request] = []
        for members in self._hosts:
            for owners in self._turns(members):
                parts = [inputs[0][:0] if owner is None else inputs[owner] for owner in owners]
                part = torch.empty_like(parts[self._lane])
                yield from self._fold_rows(parts, part, reduction)
                owner = owners[self._lane]
                if owner == self.rank:
                    gathered[self._host] = part
                elif owner is not None:
                    requests += self._requests.begin({owner: part}, {})
        requests += self._requests.begin({}, coming)
        yield from self._requests.finish(requests)
        if len(output):
            reduction.partial.fold(gathered, gathered[0])
            reduction.finish(gathered[0], self.size)
            output.copy_(gathered[0])

    def _turns(self, members: Sequence[int]) -> list[list[int | None]]:
        """Return a host's ranks in turns of this host's number of ranks; the last is filled up with None."""
        width = len(self._here)
        turns = [list[int | None](members[begin : begin + width]) for begin in range(0, len(members), width)]
        return [turn + [None] * (width - len(turn)) for turn in turns]

    # --- moves

    @collective
    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Overwrite `tensor`, contiguous, on every rank with rank `root`'s."""
        vector = tensor.view(-1)
        home = next(number for number, members in enumerate(self._hosts) if root in members)
        parts = [vector[place] for place in cut(len(vector), self._lanes)]
        parts += [vector[:0]] * (len(self._here) - self._lanes)
        if self._host == home and len(self._here) > 1:
            yield from self._rows.broadcast(vector, self._here.index(root))
        if self._lane < self._lanes:
            yield from self._pass_on(parts[self._lane], home)
        if self._host != home:
            yield from self._share_rows(parts[self._lane], parts)

    def _pass_on(self, own: Tensor, home: int) -> Steps:
        """Send `own` from the host `home` to the ranks of this lane, along a binomial tree of hosts."""
        count = len(self._hosts)
        distance = (self._host - home) % count
        # A host hears from the one at its distance without its highest bit, and then tells farther ones.
        reach = 1 << distance.bit_length()
        if distance:
            parent = self._hosts[(home + distance - reach // 2) % count][self._lane]
            yield from self._requests.exchange({}, {parent: own})
        children = []
        while distance + reach < count:
            children.append(self._hosts[(home + distance + reach) % count][self._lane])
            reach *= 2
        yield from self._requests.exchange(dict.fromkeys(children, own), {})

    @collective
    def all_gather(self, tensor: Tensor, outputs: Sequence[Tensor]) -> Steps:
        """Overwrite the vectors `outputs` with the ranks' tensors, contiguous, which may differ in length.

        Each vector goes to one rank of every other host, and from there to the others.
        """
        yield from self._gather(tensor.view(-1), outputs)

    @collective
    def all_gather_ints(self, numbers: Sequence[int], call: Call) -> Generator[bool, None, list[list[int]]]:
        """Gather some whole numbers from each rank."""
        mine = torch.tensor(numbers, device="cpu")
        table = [torch.empty_like(mine) for _ in range(self.size)]
        yield from self._gather(mine, table)
        return [row.tolist() for row in table]

    def _gather(self, vector: Tensor, outputs: Sequence[Tensor]) -> Steps:
        elsewhere = [members for members in self._hosts if members is not self._here]
        mine = [turn[self._lane] for members in elsewhere for turn in self._turns(members)]
        requests = self._requests.begin(
            {members[self._lane % len(members)]: vector for members in elsewhere},
            {rank: outputs[rank] for rank in mine if rank is not None},
        )
        outputs[self.rank].copy_(vector)
        yield from self._share_rows(outputs[self.rank], [outputs[rank] for rank in self._here])
        yield from self._requests.finish(requests)
        for members in elsewhere:
            for turn in self._turns(members):
                places = [vector[:0] if rank is None else outputs[rank] for rank in turn]
                yield from self._share_rows(places[self._lane], places)

    @collective
    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite the vectors `outputs` of rank `root` with the ranks' contiguous tensors of one shape."""
        vector = tensor.view(-1)
        if self.rank != root:
            yield from self._requests.exchange({root: vector}, {})
        else:
            outputs[root].copy_(vector)
            yield from self._requests.exchange({}, {rank: outputs[rank] for rank in self._others})

    @collective
    def scatter(self, vector: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """Overwrite `vector` with the one of rank `root`'s `inputs` for this rank; all are of one length."""
        if self.rank != root:
            yield from self._requests.exchange({}, {root: vector})
        else:
            vector.copy_(inputs[root])
            yield from self._requests.exchange({rank: inputs[rank] for rank in self._others}, {})

    @collective
    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Steps:
        """Overwrite `outputs` with each rank's input for this one; the ranks agree on the lengths first."""
        lengths = [len(one) for one in (*inputs, *outputs)]
        table = yield from self.all_gather_ints(lengths, Call.of(Collective.ALL_TO_ALL, inputs[0].dtype))
        agree_on_lengths(table, self._membership.global_ranks)
        outputs[self.rank].copy_(inputs[self.rank])
        yield from self._requests.exchange(
            {rank: inputs[rank] for rank in self._others}, {rank: outputs[rank] for rank in self._others}
        )

    @property
    def _others(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]
