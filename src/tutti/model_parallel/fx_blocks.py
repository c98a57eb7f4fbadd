"""A model as a chain of blocks, cut where a single tensor goes from one part to the next.

    x ─ conv ─ bn ─┬─ conv ─ bn ─ add ─ relu ─┬─ conv ─ bn ─ add ─ ...      a network with skip connections
                   └───────────────┘          │
                   cut                        cut

`torch.fx` writes down which operations the model's forward does. A module of torch's, or one that cannot be
written down, is one operation. Cuts are made before operations with weights, and never between two that share
some.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cached_property, partial, reduce
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer
from typing_extensions import override

from tutti.errors import BadModel
from tutti.training.evaluation import evaluating, undone
from tutti.training.precision import Arithmetic

_SAME: Final = 1e-2
"""Relative difference that bfloat16 and other orders of summation may make."""


class Block:
    """Consecutive operations of a model, into which one tensor goes, and of which one comes out.

    Args:
        root: the model.
        nodes: the operations, in order.
        given: what goes in.
        made: what comes out.

    Attributes:
        layers: the modules that it calls, and the parameters and buffers that it uses by themselves, by their
            names in the model, in order.
    """

    def __init__(self, root: nn.Module, nodes: Sequence[Node], given: Node, made: Node) -> None:
        self._root, self._nodes, self._given, self._made = root, tuple(nodes), given, made
        names: dict[str, None] = {}
        for node in nodes:
            own = [one for one in node.all_input_nodes if one.op == "get_attr"]
            own += [node] if node.op == "call_module" else []
            names |= dict.fromkeys(str(one.target) for one in own)
        self.layers: dict[str, Any] = {name: _named(root, name) for name in names}

    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs of the block."""
        return cast("Tensor", self.module(inputs))

    @property
    def name(self) -> str:
        """The name of its first layer."""
        return next(iter(self.layers), "forward")

    @property
    def state(self) -> list[Tensor]:
        """The parameters and buffers of its modules, which no other block may have."""
        modules = [layer for layer in self.layers.values() if isinstance(layer, nn.Module)]
        return [*self.module.parameters(), *(buffer for layer in modules for buffer in layer.buffers())]

    @property
    def trains(self) -> bool:
        """True if it has weights to train."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def then(self, following: Block) -> Block:
        """One block of this one and the one behind it."""
        return Block(self._root, (*self._nodes, *following._nodes), self._given, following._made)

    @cached_property
    def module(self) -> nn.Module:
        """A module of the model's own layers that computes the block."""
        graph = Graph()
        inputs = graph.placeholder("inputs")
        known = {self._given: inputs}

        def copied(node: Node) -> Node:
            if node not in known:
                assert node.op == "get_attr" or _is_count(node), "a single tensor goes into a block"
                known[node] = (
                    graph.node_copy(node) if node.op == "get_attr" else graph.call_method("size", (inputs, 0))
                )
            return known[node]

        for node in self._nodes:
            known[node] = graph.node_copy(node, copied)
        graph.output(known[self._made])
        return GraphModule(self.layers, graph)


def _named(root: nn.Module, name: str) -> Any:
    """The module, parameter or buffer of this name."""
    path, _, last = name.rpartition(".")
    return getattr(root.get_submodule(path), last)


def blocks_of(module: nn.Module, inputs: Tensor, arithmetic: Arithmetic) -> list[Block]:
    """The blocks of a model, each with weights to train but for those of a model that has none.

    Raises:
        BadModel: the model's operations cannot be written down.
    """
    graph = _graph_of(module, {})
    given = next(node for node in graph.nodes if node.op == "placeholder")
    made = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(made, Node):
        raise BadModel(_refusal(module, "it does not return one tensor"))
    blocks: list[Block] = []
    fits = _passing(module, graph, inputs, arithmetic)
    for block in _smallest(module, graph, given, made, fits):
        if blocks and not (block.trains and blocks[-1].trains):
            block = blocks.pop().then(block)
        blocks.append(block)
    return _joined(blocks)


def _smallest(module: nn.Module, graph: Graph, given: Node, made: Node, fits: Set[Node]) -> Iterator[Block]:
    """Blocks cut at every place where a single tensor passes, if that fits."""
    # Parameters and the number of samples are known in every block.
    nodes = [n for n in graph.nodes if n.op.startswith("call_") and not _is_count(n)]
    places = {node: place for place, node in enumerate(nodes)}
    last = {
        node: max((places.get(user, len(nodes)) for user in node.users if not _is_count(user)), default=-1)
        for node in [given, *nodes]
    }
    alive, begin, before = {given}, 0, given
    for place, node in enumerate(nodes):
        alive = {one for one in (*alive, node) if last[one] > place}
        if len(alive) == 1 and alive <= fits and place + 1 < len(nodes):
            (passing,) = alive
            # What a stage is given must not be changed in place: its gradient is sent back.
            if any(_changes(user, passing, module) for user in passing.users if places.get(user, 0) > place):
                continue
            yield Block(module, nodes[begin : place + 1], before, passing)
            begin, before = place + 1, passing
    yield Block(module, nodes[begin:], before, made)


def _passing(module: nn.Module, graph: Graph, inputs: Tensor, arithmetic: Arithmetic) -> set[Node]:
    """The nodes that may pass from block to block: real tensors whose first dimension is the samples."""
    found = []
    with evaluating(module), undone([module]), torch.no_grad():
        # A dimension that is as long by chance is not so for another number of samples.
        for some in (inputs, torch.cat([inputs, inputs[:1]])):
            run = _SampleWiseNodes(module, graph, len(some))
            written, wanted = arithmetic.forward(run.run, some), arithmetic.forward(module, some)
            if not torch.allclose(written, wanted, rtol=_SAME, atol=_SAME * float(wanted.abs().max())):
                why = "what it wrote down gives other outputs than the model itself"
                raise BadModel(_refusal(module, why))
            found.append(run.passing)
    return found[0] & found[1]


class _SampleWiseNodes(Interpreter):
    """An interpreter that notes which operations keep the samples in the first dimension."""

    def __init__(self, module: nn.Module, graph: Graph, samples: int) -> None:
        super().__init__(module, graph=graph)
        self._samples, self.passing = samples, set[Node]()

    @override
    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, Tensor) and found.is_floating_point() and found.shape[:1] == (self._samples,):
            self.passing.add(n)
        return found


def _joined(blocks: list[Block]) -> list[Block]:
    """The blocks, those that share a parameter or a module made one, together with all between them."""
    seen: dict[Tensor, int] = {}
    joined: list[Block] = []
    for block in blocks:
        first = min((seen[tensor] for tensor in block.state if tensor in seen), default=len(joined))
        whole = reduce(Block.then, [*joined[first:], block])
        joined[first:] = [whole]
        seen = {tensor: min(at, first) for tensor, at in seen.items()} | dict.fromkeys(whole.state, first)
    return joined


def _changes(node: Node, value: Node, module: nn.Module) -> bool:
    """Return whether an operation changes a tensor in place."""
    if node.args[:1] != (value,):
        return False
    if node.op == "call_module":
        return bool(getattr(_named(module, str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or node.kwargs.get("inplace") is True


def _is_count(node: Node) -> bool:
    """Return whether a node is the number of samples in the inputs, or their shape used for nothing else."""
    if _is_shape(node):
        return bool(node.users) and all(_is_count(user) for user in node.users)
    if node.op == "call_method" and node.target == "size":
        return _is_inputs(node.args[0]) and node.args[1:] == (0,)
    picks = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
    return picks and bool(node.args[1] == 0) and _is_shape(node.args[0])


def _is_shape(node: object) -> bool:
    if not isinstance(node, Node) or not node.args or not _is_inputs(node.args[0]):
        return False
    if node.op == "call_function":
        return getattr(node.target, "__name__", "") == "getattr" and node.args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and len(node.args) == 1


def _is_inputs(node: object) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _graph_of(module: nn.Module, known: dict[nn.Module, bool]) -> Graph:
    """The operations of a model.

    Args:
        module: the model.
        known: of parts of it, whether they can be written down; it gets what is found out.

    Raises:
        BadModel: they cannot be written down, or differ between training and evaluation.
    """
    try:
        graphs = _traced(module, known)
    except Exception as error:
        # Whatever the model's own code does when it is given no numbers.
        raise BadModel(_refusal(module, f"{type(error).__name__}: {error}")) from error
    if str(graphs[0]) != str(graphs[1]):
        why = "its forward asks whether it trains; leave that to layers such as nn.Dropout"
        raise BadModel(_refusal(module, why))
    return graphs[0]


def _refusal(module: nn.Module, why: str) -> str:
    return (
        f"the model is a {type(module).__name__}, whose forward torch.fx cannot write down, and a pipeline "
        f"needs that ({why}). Put what depends on values or shapes into a module of its own, write the model "
        "as an nn.Sequential, or use --parallel sharded"
    )


def _traced(module: nn.Module, known: dict[nn.Module, bool]) -> tuple[Graph, Graph]:
    """The operations in training and in evaluation."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    with evaluating(module):
        training, evaluation = (
            _Tracer(known).trace(module.train(mode), dict(defaults)) for mode in (True, False)
        )
    for graph in (training, evaluation):
        # Arguments besides the inputs have their defaults; what checks them is of no use.
        useless = set([node for node in graph.nodes if node.op == "placeholder"][1:])
        for node in graph.nodes:
            if not useless.isdisjoint(node.all_input_nodes):
                useless.add(node)
        for node in reversed(list(graph.nodes)):
            if node in useless:
                graph.erase_node(node)
    return training, evaluation


class _Tracer(Tracer):
    """Writes down what modules of the user's do, as far as that goes.

    Args:
        known: of modules, whether they can be written down; it gets what is found out.
    """

    def __init__(self, known: dict[nn.Module, bool]) -> None:
        super().__init__()
        self._known = known

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if type(m) is nn.TransformerEncoder:
            return False
        return super().is_leaf_module(m, module_qualified_name) or not self._can_be_traced(m)

    def _can_be_traced(self, module: nn.Module) -> bool:
        """Return whether a part of a model can be traced; otherwise it is one operation."""
        # Without a memory the time would double with each level of modules in modules.
        if module not in self._known:
            try:
                _graph_of(module, self._known)
            except BadModel:
                self._known[module] = False
            else:
                self._known[module] = True
        return self._known[module]

    @override
    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if type(m) is nn.TransformerEncoder and len(args) == 1 and not kwargs:
            forward = partial(_encode, m)
        return super().call_module(m, forward, args, kwargs)


def _encode(encoder: nn.TransformerEncoder, inputs: Tensor) -> Tensor:
    """An encoder's forward without a mask; its own looks at the values to find a faster way."""
    outputs = inputs
    for layer in encoder.layers:
        outputs = layer(outputs)
    return outputs if encoder.norm is None else cast("Tensor", encoder.norm(outputs))
