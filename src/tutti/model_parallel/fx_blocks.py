"""A model as a chain of blocks, cut where a single tensor goes from one block to the next.

    x ─ conv ─ bn ─┬─ conv ─ bn ─ add ─ relu ─┬─ conv ─ bn ─ add ─ ...      a network with skip connections
                   └───────────────┘          │
                   cut                        cut

`torch.fx` traces the model's own forward. It goes through each `nn.Sequential`; any other module is one
operation. Cuts are made before operations with weights, and never between two that share some.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set
from functools import cached_property, reduce
from typing import Any, Final

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
    """Consecutive operations of a model, with one tensor as input and one as output.

    Args:
        root: the model.
        nodes: the operations, in order.
        before: makes the input.
        last: makes the output.

    Attributes:
        layers: the modules that it calls, and the parameters and buffers that it uses directly, by their
            names in the model, in order.
    """

    def __init__(self, root: nn.Module, nodes: Sequence[Node], before: Node, last: Node) -> None:
        self._root, self._nodes, self._before, self._last = root, tuple(nodes), before, last
        names: dict[str, None] = {}
        for node in nodes:
            own = [one for one in node.all_input_nodes if one.op == "get_attr"]
            own += [node] if node.op == "call_module" else []
            names |= dict.fromkeys(str(one.target) for one in own)
        self.layers: dict[str, Any] = {name: _named(root, name) for name in names}

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
        """One block of this one and the next."""
        return Block(self._root, (*self._nodes, *following._nodes), self._before, following._last)

    @cached_property
    def module(self) -> nn.Module:
        """A module of the model's own layers that computes the block."""
        graph = Graph()
        known = {self._before: graph.placeholder("inputs")}

        def copied(node: Node) -> Node:
            if node not in known:
                assert node.op == "get_attr", "a single tensor goes into a block"
                known[node] = graph.node_copy(node)
            return known[node]

        for node in self._nodes:
            known[node] = graph.node_copy(node, copied)
        graph.output(known[self._last])
        return GraphModule(self.layers, graph)


def _named(root: nn.Module, name: str) -> Any:
    """The module, parameter or buffer of this name."""
    path, _, last = name.rpartition(".")
    return getattr(root.get_submodule(path), last)


def blocks_of(module: nn.Module, inputs: Tensor, arithmetic: Arithmetic) -> list[Block]:
    """The blocks of a model, each with weights to train unless the model has none.

    Raises:
        BadModel: the model's forward cannot be traced.
    """
    graph = _graph_of(module)
    made = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(made, Node):
        raise BadModel(_refusal(module, "it does not return one tensor"))
    fits = _passing(module, graph, inputs, arithmetic)
    if made not in fits:
        raise BadModel(_refusal(module, "the first dimension of its outputs is not the samples"))
    blocks: list[Block] = []
    for block in _smallest(module, graph, made, fits):
        if blocks and not (block.trains and blocks[-1].trains):
            block = blocks.pop().then(block)
        blocks.append(block)
    return _joined(blocks)


def _smallest(module: nn.Module, graph: Graph, made: Node, fits: Set[Node]) -> Iterator[Block]:
    """Blocks cut at every place where a single tensor passes, if that fits."""
    # Parameters are known in every block.
    given, *nodes = [node for node in graph.nodes if node.op == "placeholder" or node.op.startswith("call_")]
    places = {node: place for place, node in enumerate(nodes)}
    last = {
        node: max((places.get(user, len(nodes)) for user in node.users), default=-1)
        for node in (given, *nodes)
    }
    alive, begin, before = {given}, 0, given
    for place, node in enumerate(nodes):
        alive = {one for one in (*alive, node) if last[one] > place}
        if len(alive) == 1 and alive <= fits and place + 1 < len(nodes):
            (passing,) = alive
            # The input of a stage must not be changed in place: its gradient is sent back.
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
            traced, wanted = arithmetic.forward(run.run, some), arithmetic.forward(module, some)
            if not torch.allclose(traced, wanted, rtol=_SAME, atol=_SAME * float(wanted.abs().max())):
                raise BadModel(_refusal(module, "its trace gives other outputs than the model itself"))
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


def _graph_of(module: nn.Module) -> Graph:
    """The operations of a model.

    Raises:
        BadModel: they cannot be traced, or differ between training and evaluation.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        with evaluating(module):
            graph, evaluated = (_Tracer().trace(module.train(on), dict(defaults)) for on in (True, False))
    except Exception as error:
        # Whatever the model's own code does when it is given no numbers.
        raise BadModel(_refusal(module, f"{type(error).__name__}: {error}")) from error
    if str(graph) != str(evaluated):
        why = "its forward asks whether it trains; leave that to layers such as nn.Dropout"
        raise BadModel(_refusal(module, why))
    # Arguments besides the inputs have their defaults, which need no checks.
    useless = set([node for node in graph.nodes if node.op == "placeholder"][1:])
    for node in graph.nodes:
        if not useless.isdisjoint(node.all_input_nodes):
            useless.add(node)
    for node in reversed(list(graph.nodes)):
        if node in useless:
            graph.erase_node(node)
    return graph


def _refusal(module: nn.Module, why: str) -> str:
    return (
        f"the model is a {type(module).__name__}, which cannot be cut into a pipeline "
        f"({why}). Put what depends on values or shapes into a module of its own, write the model as an "
        "nn.Sequential, or use --parallel sharded"
    )


class _Tracer(Tracer):
    """Traces the model's own forward and those of nn.Sequential."""

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward
