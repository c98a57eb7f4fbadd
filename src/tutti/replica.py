"""A model as one vector.

`Replica` lays the trainable parameters of a module into one flat tensor, their gradients into a second, and
the floating-point buffers (BatchNorm's statistics) into a third; the module's own become views into them.
A module of several dtypes has one such vector per dtype.

    module.0.weight ─┐            ┌──────────────┬──────┬─────────┐
    module.0.bias   ─┼─ views of ─┤ 0.weight     │0.bias│ 1.weight│   Flat.weights (and Flat.grads alike)
    module.1.weight ─┘            └──────────────┴──────┴─────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, cast

import torch
from torch import Tensor, nn

from tutti.errors import BadModel

ALIGNMENT = 16
"""Every parameter begins at a multiple of this many elements: in fp32, at a cache line."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The other order of elements in memory, by the number of a tensor's dimensions."""

Vectors = Callable[[int, torch.dtype, torch.device], Tensor]
"""(length, dtype, device) -> zeros."""


@dataclass(frozen=True)
class ReplicaMemory:
    """The memory of a replica's vectors; by default this process's own."""

    weights: Vectors = lambda length, dtype, device: torch.zeros(length, dtype=dtype, device=device)
    # The gradients of all ranks that share memory: zeros of shape (ranks, length).
    gradients: Vectors = lambda length, dtype, device: torch.zeros(1, length, dtype=dtype, device=device)
    row: int = 0  # this replica's row in them
    fill: bool = True  # one of several replicas over the same weights writes its values into them


@dataclass(frozen=True)
class Flat:
    """All trainable parameters of one dtype, end to end. Gaps between them (alignment) stay zero."""

    weights: Tensor  # the parameters, one vector
    grads: Tensor  # their gradients, one vector of the same length: this replica's row of `rows`
    rows: Tensor  # the gradients of all ranks that share memory, of shape (ranks, length)
    names: tuple[str, ...]  # the parameters' names, in the order of the vector
    parameters: tuple[nn.Parameter, ...]  # the module's own parameters, views into `weights`
    spans: tuple[slice, ...]  # the place of each parameter in the vector


@dataclass(frozen=True)
class NormShare:
    """A rank's part of a gradient's norm, where the ranks of a team hold one model together."""

    counts: Callable[[nn.Parameter], bool]  # whether a parameter counts on this rank: on one of the team
    add_up: Callable[[float], float]  # sums squares over the whole model (collective over the team)


Missing = frozenset[nn.Parameter]
"""Parameters without a gradient in an update, which torch's optimizers leave unchanged."""

NONE_MISSING: Final[Missing] = frozenset()


class Gradients:
    """The gradients of a replica.

    Dense gradients are in the vectors; entries without a gradient are zero. Sparse gradients of embeddings
    and parts of DTensors exist only as `parameter.grad`.

    Each parameter's view of the vector has its own version counter, which counts what autograd adds: it says
    which parameters have got a gradient without a look at the numbers.
    """

    def __init__(self, flats: Sequence[Flat], apart: Iterable[nn.Parameter]) -> None:
        self._flats, self._apart = flats, {id(parameter): parameter for parameter in apart}
        self.share: NormShare | None = None  # this rank's part of their norm; None: the model is whole here
        # With gradients in the vectors, in their order.
        self.parameters = tuple(parameter for flat in flats for parameter in flat.parameters)
        self._views = [cast("Tensor", parameter.grad) for parameter in self.parameters]
        self._find_places()

    def keep_apart(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients of these parameters, and have autograd make new ones from now on."""
        self._apart |= {id(parameter): parameter for parameter in parameters}
        for parameter in self._apart.values():
            parameter.grad = None
        held = zip(self.parameters, self._views, strict=True)
        dense = [(parameter, view) for parameter, view in held if id(parameter) not in self._apart]
        self.parameters, self._views = tuple(p for p, _ in dense), [view for _, view in dense]
        self._find_places()

    def _find_places(self) -> None:
        self.places = [(flat, one) for flat in self._flats for one in _stretches_without(flat, self._apart)]
        self._dense = [flat.grads[place] for flat, place in self.places]
        self._versions = [view._version for view in self._views]

    def apart(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters with gradients of their own, and this process's part of these.

        It may be changed in place; for an embedding table it is the rows that were looked up, each once.
        """
        for parameter in self._apart.values():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                parameter.grad = gradient = gradient.coalesce()
                yield parameter, gradient.values()
            else:
                yield parameter, local(gradient)

    def vectors(self) -> Sequence[Tensor]:
        """Return all tensors that hold gradients; they may be changed in place."""
        return [*self._dense, *(gradient for _, gradient in self.apart())] if self._apart else self._dense

    def missing(self) -> Missing:
        """Return which of `parameters` got no gradient since the last call; to be called once per update."""
        before, self._versions = self._versions, [view._version for view in self._views]
        if not any(map(int.__eq__, before, self._versions)):
            return NONE_MISSING
        held = zip(self.parameters, self._views, before, self._versions, strict=True)
        return frozenset(
            parameter for parameter, view, old, new in held if old == new and _lacks_gradient(parameter, view)
        )

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`, in place."""
        for vector in self.vectors():
            vector.mul_(factor)

    def zero(self) -> None:
        """Zero all gradients in place; those kept apart are dropped."""
        for vector in self._dense:
            vector.zero_()
        for parameter in self._apart.values():
            parameter.grad = None

    def is_finite(self) -> bool:
        """Return whether no element is NaN or inf."""
        return all(map(is_finite, self.vectors()))

    def squared_norm(self) -> float:
        """Return the sum of the squares of the whole model's gradient (collective over its team)."""
        if self.share is None:
            return squared_norm(self.vectors())
        counts = self.share.counts
        held = chain(zip(self.parameters, self._views, strict=True), self.apart())
        return self.share.add_up(squared_norm(gradient for parameter, gradient in held if counts(parameter)))


class Replica:
    """A module as flat vectors, one for each dtype, in order of first appearance.

    The parameters are re-pointed into the vectors, keeping their values. Tied weights are stored once. Frozen
    parameters are left where they are, unless `frozen` ones may be trained later. BadModel: nothing can be
    trained, the parameters are on several devices or not initialised, or two of them share memory.
    """

    def __init__(
        self, module: nn.Module, memory: ReplicaMemory = ReplicaMemory(), frozen: bool = False
    ) -> None:
        self.module = module
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            _refuse_unusable(name, tensor)
        named = [
            (name, p)
            for name, p in module.named_parameters()
            if p.requires_grad or (frozen and (p.is_floating_point() or p.is_complex()))
        ]
        if not named:
            raise BadModel(
                "the model has no trainable parameter; set requires_grad on what should be trained"
            )
        devices = list(dict.fromkeys(str(p.device) for _, p in named))
        if len(devices) > 1:
            raise BadModel(
                f"the model lies on {' and '.join(devices)}; move it to one of them: model.to('{devices[0]}')"
            )
        _refuse_shared_memory(named)
        # DTensors are left where they are.
        self.scattered = tuple((name, p) for name, p in named if type(p.data) is not Tensor)
        named = [(name, p) for name, p in named if type(p.data) is Tensor]
        dtypes = dict.fromkeys(p.dtype for _, p in named)
        self.flats = tuple(
            _flatten([(n, p) for n, p in named if p.dtype == dtype], dtype, memory) for dtype in dtypes
        )
        self.gradients = Gradients(self.flats, (p for _, p in self.scattered))
        self.buffers = _flatten_buffers(module)

    def point_to(self, weights: Iterable[Tensor]) -> None:
        """Point the module's parameters into other vectors, such as a copy of the weights to evaluate."""
        for flat, vector in zip(self.flats, weights, strict=True):
            for parameter, span in zip(flat.parameters, flat.spans, strict=True):
                parameter.data = stretch_like(vector, span, parameter)

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self.gradients.zero()

    def first_not_finite(self, *, gradients: bool = True, weights: bool = True) -> str | None:
        """Return the name of the first parameter with NaN or inf in its gradient or weights, if any."""
        for flat in self.flats:
            vectors = [flat.grads] * gradients + [flat.weights] * weights
            if all(map(is_finite, vectors)):
                continue
            for name, span in zip(flat.names, flat.spans, strict=True):
                if not all(is_finite(vector[span]) for vector in vectors):
                    return name
        names = {**self.names, **{parameter: name for name, parameter in self.scattered}}
        held = [(p, local(p.detach())) for _, p in self.scattered] if weights else []
        held += self.gradients.apart() if gradients else []
        return next((names[parameter] for parameter, tensor in held if not is_finite(tensor)), None)

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The names of the parameters that are laid out."""
        return {p: name for flat in self.flats for name, p in zip(flat.names, flat.parameters, strict=True)}

    @property
    def count(self) -> int:
        """The number of trainable numbers in the model."""
        laid_out = sum(p.numel() for flat in self.flats for p in flat.parameters)
        return laid_out + sum(p.numel() for _, p in self.scattered)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, or any other tensor unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or inf, without allocating."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # A sum is NaN or inf if an element is, but also if large ones overflow.
    return math.isfinite(tensor.sum().item()) or bool(torch.stack(tensor.aminmax()).isfinite().all())


def two_norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm in float64, a scalar."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.float64)
    return norm


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Return the sum of the squares of all elements, in float64."""
    norms = [float(two_norm(gradient)) for gradient in gradients]
    return sum(norm * norm for norm in norms)


def view_like(vector: Tensor, like: Tensor) -> Tensor:
    """Return `vector` in the shape and memory format of `like` (channels_last stays channels_last)."""
    if like.dim() in _FORMATS and like.is_contiguous(memory_format=_FORMATS[like.dim()]):
        return vector.as_strided(like.shape, like.stride())
    return vector.view(like.shape)


def vector_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` in the order of `view_like`; they share its memory if possible."""
    tensor = tensor.expand_as(like)
    last = like.dim() in _FORMATS and like.is_contiguous(memory_format=_FORMATS[like.dim()])
    return (tensor.movedim(1, -1) if last else tensor).reshape(-1)


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Overwrite each tensor with its counterpart."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def stretch_like(vector: Tensor, span: slice, like: Tensor) -> Tensor:
    """Return a stretch of `vector`, like `view_like`, with its own storage over the same memory.

    Saving or copying a tensor includes the whole storage behind it.
    """
    first, size = vector.storage_offset(), vector.element_size()
    storage = vector.untyped_storage()[(first + span.start) * size : (first + span.stop) * size]
    stretch = torch.empty(0, dtype=vector.dtype, device=vector.device)
    return view_like(stretch.set_(storage), like)


def _lacks_gradient(parameter: nn.Parameter, view: Tensor) -> bool:
    """Return whether a parameter has no gradient, given the view to which autograd has added nothing."""
    # A gradient may have been written into the vector itself.
    return parameter.grad is None or (parameter.grad is view and not bool(view.any()))


def _stretches_without(flat: Flat, apart: Container[int]) -> Iterator[slice]:
    """Yield the stretches of a vector without some parameters, given by id; they end where these begin."""
    begin, edges = 0, [*(span.start for span in flat.spans[1:]), len(flat.weights)]
    for parameter, span, stop in zip(flat.parameters, flat.spans, edges, strict=True):
        if id(parameter) in apart:
            if begin < span.start:
                yield slice(begin, span.start)
            begin = stop
    if begin < len(flat.weights):
        yield slice(begin, len(flat.weights))


def _refuse_unusable(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise BadModel(f"'{name}' of the model is lazy; run one batch through the model before training it")
    if tensor.is_meta:
        raise BadModel(
            f"'{name}' of the model lies on the meta device; call model.to_empty(device='cpu'), "
            "then initialise it"
        )


def _refuse_shared_memory(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    first: dict[int, str] = {}
    for name, parameter in named:
        if type(parameter.data) is not Tensor or not parameter.numel():
            continue
        other = first.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise BadModel(
                f"'{other}' and '{name}' of the model are two parameters in the same memory; to tie them use "
                "one in both places (b.weight = a.weight), else give each its own: .detach().clone()"
            )


def _flatten(named: list[tuple[str, nn.Parameter]], dtype: torch.dtype, memory: ReplicaMemory) -> Flat:
    spans, length = _lay_out(p for _, p in named)
    device = named[0][1].device
    rows = memory.gradients(length, dtype, device)
    weights, grads = memory.weights(length, dtype, device), rows[memory.row]
    names, parameters = tuple(name for name, _ in named), tuple(p for _, p in named)
    with torch.no_grad():
        for parameter, span in zip(parameters, spans, strict=True):
            view, grad = stretch_like(weights, span, parameter), view_like(grads[span], parameter)
            if memory.fill:
                view.copy_(parameter)
            parameter.data = view
            grad.zero_()
            parameter.grad = grad.data  # with its own version counter
    return Flat(weights, grads, rows, names, parameters, spans)


def _lay_out(tensors: Iterable[Tensor]) -> tuple[tuple[slice, ...], int]:
    spans, start = [], 0
    for tensor in tensors:
        spans.append(slice(start, start + tensor.numel()))
        start += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    return tuple(spans), start


def _flatten_buffers(module: nn.Module) -> tuple[Tensor, ...]:
    floating: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.layout is torch.strided:
            floating.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    vectors = []
    for (dtype, device), buffers in floating.items():
        spans, length = _lay_out(buffers)
        vector = torch.zeros(length, dtype=dtype, device=device)
        with torch.no_grad():
            for buffer, span in zip(buffers, spans, strict=True):
                view = stretch_like(vector, span, buffer)
                view.copy_(buffer)
                buffer.data = view
        vectors.append(vector)
    return tuple(vectors)
