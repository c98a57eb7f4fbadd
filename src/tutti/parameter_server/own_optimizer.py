"""The user's optimizer object, which steps the centre's weights in a loop of the user's.

    state of all workers   ├─────────────── in shared memory, behind a lock ────────────────┤
    worker 0   pushes │ optimizer: centre's weights, message, shared state │ as it was before │ pulls
    worker 1            looks at `optimizer.state`: gets a copy │ ...

While it steps, its parameters are the centre's weights, their gradients the message, and its state is the
shared one. Its options are those that this worker's loop has set; only what the optimizer itself counts in
its param groups is shared, too. A single worker's optimizer keeps its state itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.runs import bare_copy
from tutti.optim.state import held_by
from tutti.optim.whole_state import State, WholeState
from tutti.parameter_server.base import Allocate, Vectors
from tutti.parameter_server.optimizer_state import SharedState, StateEntry, allocate_states, describe
from tutti.replica import Missing, Replica, view_like
from tutti.state import Held


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
        self._live: defaultdict[Any, State] = defaultdict(dict)
        self._whole = WholeState(self._copy_state)
        self._shared: SharedState | None = None
        self._counted: list[object] = []

    def open(self, centre: Vectors, message: Vectors, allocate: Allocate) -> None:
        """Prepare to step `centre` by gradients that are in `message` (collective)."""
        self._centre = centre
        self._gradients = [
            view_like(vector[span], parameter)
            for flat, vector in zip(self._replica.flats, message, strict=True)
            for parameter, span in zip(flat.parameters, flat.spans, strict=True)
        ]
        if self._comm.size == 1:
            return
        (self._shared,) = allocate_states([(self._optimizer, self._parameters)], [self._describe()], allocate)
        self._lock = self._comm.lock()
        self._optimizer.register_state_dict_pre_hook(lambda _: self._take_counts())
        self.adopt()

    @torch.no_grad()
    def _describe(self) -> list[StateEntry]:
        """List what the optimizer keeps, as a step of a copy with all parameters shows."""
        copies = {p: nn.Parameter(p.detach().clone()) for p in self._parameters}
        groups = [
            {
                **{name: deepcopy(value) for name, value in group.items() if name != "params"},
                "params": [copies[p] for p in group["params"] if p in copies],
            }
            for group in self._optimizer.param_groups
        ]
        known = {id(p) for group in groups for p in group["params"]}
        # Parameters of no group: `add_param_group` may bring them later.
        absent = [copy for copy in copies.values() if id(copy) not in known]
        groups[0]["params"] += absent
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        stepped = bare_copy(self._optimizer, groups)
        try:
            return describe(stepped, list(copies.values()), lambda: type(stepped).step(stepped))
        except (RuntimeError, ValueError) as error:
            if not absent:
                raise
            shapes = ", ".join(sorted({str(tuple(copy.shape)) for copy in absent}))
            raise BadOption(
                f"{type(stepped).__name__} has parameters of the model in no param group (of shape {shapes}) "
                f"and cannot step them: {error}. Freeze them (requires_grad_(False)), use an optimizer for "
                "all parameters, or a strategy without a centre, such as tutti.Sync()"
            ) from error

    @torch.no_grad()
    def adopt(self) -> None:
        """Go on from the state that the optimizer has been given, the same on every worker (collective).

        Raises:
            BadOption: it is of another kind than the optimizer's own.
        """
        if self._shared is None:
            return
        given = self._optimizer.state
        self._live = defaultdict(dict, {p: dict(given[p]) for p in self._parameters if given.get(p)})
        self._optimizer.state = self._live
        self._shared.check()
        self._comm.barrier()
        if self._comm.rank == 0:
            self._shared.clear()
            self._shared.leave()
        self._comm.barrier()
        self._live.clear()
        self._shared.forget()
        with self._lock, self._lent():
            self._shared.take()

    def state(self, names: Mapping[nn.Parameter, str]) -> Held:
        """Return what the optimizer keeps for each parameter; what it counts is in its param groups."""
        self.forget()
        return held_by(self._optimizer, names)

    def step(self, missing: Missing) -> None:
        """Move the centre's weights, but for the parameters that have no gradient.

        Raises:
            BadOption: the loop has changed what all workers share.
        """
        own = [parameter.grad for parameter in self._parameters]
        self._refuse_changes()
        self._replica.look_at(self._centre)
        for parameter, view in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = None if parameter in missing else view
        try:
            if self._shared is None:
                self._optimizer.step()
            else:
                with self._lock, self._lent():
                    self._shared.step(self._optimizer.step)
        finally:
            self._replica.look_at([flat.weights for flat in self._replica.flats])
            for parameter, gradient in zip(self._parameters, own, strict=True):
                parameter.grad = gradient

    def forget(self) -> None:
        """Have the state that the loop sees made again, as others have stepped.

        Raises:
            BadOption: the loop has changed what all workers share.
        """
        if self._shared is not None:
            self._refuse_changes()
            self._whole.forget()
            self._take_counts()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Give the optimizer the shared state inside; outside, a copy is made when it is read."""
        self._optimizer.state = self._live
        try:
            yield
        finally:
            self._optimizer.state = self._whole
            self._whole.forget()
            self._counted = self._counts()

    def _counts(self) -> list[object]:
        """Return the counts that the optimizer keeps in its param groups."""
        assert self._shared is not None
        groups = self._optimizer.param_groups
        return [groups[entry.number].get(entry.name) for entry in self._shared.of_groups]

    def _take_counts(self) -> None:
        """Read what others have counted in the optimizer's groups."""
        assert self._shared is not None
        if self._shared.of_groups and not self._is_changed():
            with self._lock:
                self._optimizer.state, whole = self._live, self._whole
                self._shared.take()
                self._optimizer.state, self._counted = whole, self._counts()

    def _is_changed(self) -> bool:
        if self._optimizer.state is not self._whole or self._whole.changed():
            return True
        pairs = zip(self._counts(), self._counted, strict=True)
        return any(now is not then and (isinstance(now, Tensor) or now != then) for now, then in pairs)

    def _refuse_changes(self) -> None:
        if self._shared is not None and self._is_changed():
            raise BadOption(
                "the loop has changed the optimizer's state on this rank, but all workers share it, as their "
                "strategy has a parameter centre; give what it is to be to optimizer.load_state_dict(), on "
                "every rank, or use the default strategy, Sync()"
            )

    @torch.no_grad()
    def _copy_state(self) -> dict[Any, State]:
        assert self._shared is not None
        with self._lock:
            return self._shared.copy()
