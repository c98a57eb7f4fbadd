"""One operation under way, as torch.distributed sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

if TYPE_CHECKING:
    from tutti.backend.messages import Receiving
    from tutti.backend.progress import Progress
    from tutti.backend.rows import Steps


class Operation(Work):
    """What `async_op=True` returns.

    Args:
        progress: what runs it, or None if it is done already.
        steps: what is to be done.
        outputs: the tensors that hold its result.
        what: its name in errors.
        absent: tells who has not come, by rank in the group.
        receiving: for a receive, what it waits for.
    """

    def __init__(
        self,
        progress: Progress | None,
        steps: Steps | None,
        outputs: Sequence[Tensor],
        what: str = "",
        absent: Callable[[], list[int]] = list,
        receiving: Receiving | None = None,
    ) -> None:
        super().__init__()
        self.what, self.absent, self.timeout_s = what, absent, 0.0
        self.deadline_s = 0.0
        self.done, self.error = steps is None, None
        self._progress, self._steps = progress, steps
        self._outputs, self._receiving = list(outputs), receiving
        self._future: Future[Any] | None = None
        self._source: Future[Any] | None = None

    error: BaseException | None

    @classmethod
    def failed(cls, error: BaseException) -> Operation:
        """One that is over."""
        operation = cls(None, None, ())
        operation.error = error
        return operation

    # --- for who runs it

    def advance(self) -> bool:
        """Go on until it would have to wait; whether anything moved or it ended."""
        assert self._steps is not None
        moved = False
        for moves in self._steps:
            if not moves:
                return moved
            moved = True
        self.done = True
        return True

    def end(self, error: BaseException | None) -> None:
        """Be over; `publish` is to follow, outside of all locks."""
        self.done, self.error = True, error
        if error is not None and self._steps is not None:
            self._steps.close()
        self._steps = None

    def publish(self) -> None:
        """Tell whoever waits for the future."""
        if self._source is not None:
            self._source.set_result(self._outputs if self.error is None else self.error)

    # --- for the user

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it is done.

        Args:
            timeout: how long to wait at most; 0: as long as the group allows.

        Raises:
            TuttiError: it failed: a rank is lost, did not come, or called something else.
        """
        if not self.done and self._progress is not None:
            self._progress.finish(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Return when it is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self.done

    def is_success(self) -> bool:
        """Whether it is over and did not fail."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """Why it failed, if it did."""
        return self.error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        return self._outputs

    def source_rank(self) -> int:
        """Who sent what was received."""
        return self._receiving.sender if self._receiving is not None else -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future of the tensors that hold the result; it fails if the operation does."""
        if self._future is None:
            source: Future[Any] = Future()
            with self._progress.lock if self._progress is not None else _nothing:
                if not self.done:
                    self._source = source
            # Only what a callback raises becomes an error of a future that C++ understands.
            self._future = source if self.done and self.error is None else source.then(_result)
            if self._source is None:
                source.set_result(self._outputs if self.error is None else self.error)
        return self._future


def _result(source: Future[Any]) -> Any:
    found = source.value()
    if isinstance(found, BaseException):
        raise found
    return found


_nothing: AbstractContextManager[None] = nullcontext()
