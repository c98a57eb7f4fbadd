"""One operation under way, for torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

if TYPE_CHECKING:
    from tutti.comm.shm.barrier import Steps
    from tutti.comm.shm.point_to_point import Receiving


class OperationEngine(Protocol):
    """The engine that runs a group's operations; its lock is held by the thread that does."""

    lock: Lock

    def finish(self, operation: Operation, timeout_s: float = 0.0) -> None:
        """Wait until an operation is over."""


class Operation(Work):
    """The work object that `async_op=True` returns."""

    done = False
    error: BaseException | None = None
    deadline_s = 0.0  # by `time.monotonic`; 0 before its turn
    _progress: OperationEngine | None = None
    _steps: Steps | None = None
    _receiving: Receiving | None = None
    _future: Future[Any] | None = None
    _source: Future[Any] | None = None

    def __init__(
        self,
        progress: OperationEngine,
        steps: Steps,
        outputs: Sequence[Tensor],
        what: str,  # its name in errors
        absent: Callable[[], list[int]],  # returns the ranks that have not come
        timeout_s: float,  # from its turn on
        receiving: Receiving | None = None,  # the awaited message
    ) -> None:
        super().__init__()
        self.what, self.absent, self.timeout_s = what, absent, timeout_s
        self._progress, self._steps = progress, steps
        self._outputs, self._receiving = outputs, receiving

    @classmethod
    def over(cls, outputs: Sequence[Tensor]) -> Operation:
        """Make a finished one."""
        operation = cls.__new__(cls)
        Work.__init__(operation)
        operation.done, operation._outputs = True, outputs
        return operation

    @classmethod
    def failed(cls, error: BaseException) -> Operation:
        """Make a failed one."""
        operation = cls.over(())
        operation.error = error
        return operation

    # --- for the progress engine

    def advance(self) -> bool:
        """Proceed until it would have to wait; return whether anything moved or it ended."""
        assert self._steps is not None
        moved = False
        for moves in self._steps:
            if not moves:
                return moved
            moved = True
        self.done = True
        return True

    def end(self, error: BaseException | None) -> None:
        """End it; `publish` must follow, outside all locks."""
        self.done, self.error = True, error
        if error is not None and self._steps is not None:
            self._steps.close()
        self._steps = None

    @property
    def has_future(self) -> bool:
        """Return whether the future was requested."""
        return self._source is not None

    def publish(self) -> None:
        """Resolve the future, if it was requested."""
        if self._source is not None:
            self._source.set_result(list(self._outputs) if self.error is None else self.error)

    # --- for the user

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it is done, or raise its error; a time-out of 0 is the group's."""
        if not self.done and self._progress is not None:
            self._progress.finish(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Return when it is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self.done

    def is_success(self) -> bool:
        """Return whether it is over and did not fail."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """Return why it failed, if it did."""
        return self.error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return the sender of the received message."""
        return self._receiving.sender if self._receiving is not None else -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that hold the result; it fails if the operation does."""
        if self._future is None:
            source: Future[Any] = Future()
            with self._progress.lock if self._progress is not None else _nothing:
                if not self.done:
                    self._source = source
            # Only what a callback raises becomes an error of a future that C++ understands.
            self._future = source if self.done and self.error is None else source.then(_result)
            if self._source is None:
                source.set_result(list(self._outputs) if self.error is None else self.error)
        return self._future


def _result(source: Future[Any]) -> Any:
    found = source.value()
    if isinstance(found, BaseException):
        raise found
    return found


_nothing: AbstractContextManager[None] = nullcontext()
