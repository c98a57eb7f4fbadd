"""The user's optimizer object, which steps the centre's weights in a loop of the user's.

    state of all workers   ├──────────── in shared memory, moved behind the centre's lock ────────────┤
    worker 0   pushes │ optimizer: centre's weights, message, shared state │ as it was before │ pulls
    worker 1            `optimizer.state` has the same tensors │ ...

While it steps, its parameters are the centre's weights and their gradients the message. Its options are those
that this worker's loop has set.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.optim.runs import bare_copy
from tutti.parameter_server.base import Allocate, Vectors
from tutti.parameter_server.optimizer_state import SharedState, StateEntry, allocate_states, describe
from tutti.replica import Missing, Replica, view_like


class OwnOptimizer:
    """The user's optimizer, stepped on the centre's weights.

    Args:
        optimizer: the user's.
        replica: the model, with all parameters that may be trained some time.
        comm: the workers, all on one host.
    """

    def __init__(self, optimizer: Optimizer, replica: Replica, comm: Communicator) -> None:
        self._optimizer, self._replica, self._comm = optimizer, replica, comm
        self._parameters = [parameter for flat in replica.flats for parameter in flat.parameters]
        self._centre: Vectors = ()
        self._gradients: list[Tensor] = []
        self._shared: SharedState

    def open(self, centre: Vectors, message: Vectors, allocate: Allocate) -> None:
        """Prepare to step `centre` by gradients that are in `message` (collective)."""
        self._centre = centre
        self._gradients = [
            view_like(vector[span], parameter)
            for flat, vector in zip(self._replica.flats, message, strict=True)
            for parameter, span in zip(flat.parameters, flat.spans, strict=True)
        ]
        owners = [(self._optimizer, self._parameters)]
        (self._shared,) = allocate_states(owners, [self._describe()], allocate)
        self.adopt()

    @torch.no_grad()
    def _describe(self) -> list[StateEntry]:
        """List what the optimizer keeps, as a step of a copy with all parameters shows."""
        copies = {p: nn.Parameter(p.detach().clone()) for p in self._parameters}
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        groups = [
            {
                **{name: deepcopy(value) for name, value in group.items() if name != "params"},
                "params": [copies[p] for p in group["params"] if p in copies],
            }
            for group in self._optimizer.param_groups
        ]
        # Parameters of no group: `add_param_group` may bring them later.
        listed = {id(p) for group in groups for p in group["params"]}
        groups[0]["params"] += [copy for copy in copies.values() if id(copy) not in listed]
        stepped = bare_copy(self._optimizer, groups)
        return describe(stepped, list(copies.values()), lambda: type(stepped).step(stepped))

    @torch.no_grad()
    def adopt(self) -> None:
        """Go on from the state that the optimizer was given, the same on every worker (collective).

        Raises:
            BadOption: it is of another kind than the optimizer's own.
        """
        self._comm.barrier()
        if self._comm.rank == 0:
            self._shared.clear()
            self._shared.leave()
        self._comm.barrier()
        self._shared.drop()
        self._shared.take()

    def look(self) -> None:
        """Give the optimizer what others have made since its last step."""
        self._shared.take()

    def step(self, missing: Missing) -> None:
        """Move the centre's weights, but for the parameters that have no gradient."""
        own = [parameter.grad for parameter in self._parameters]
        self._replica.look_at(self._centre)
        for parameter, view in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = None if parameter in missing else view
        try:
            self._shared.step(self._optimizer.step)
        finally:
            self._replica.look_at([flat.weights for flat in self._replica.flats])
            for parameter, gradient in zip(self._parameters, own, strict=True):
                parameter.grad = gradient
