"""A model as a chain of blocks, and these as the stages of a pipeline.

    x ─ conv ─ bn ─┬─ conv ─ bn ─ add ─ relu ─┬─ conv ─ bn ─ add ─ ...      a network with skip connections
                   └───────────────┘          │
                   cut                        cut

`torch.fx` traces the model's own forward. It goes through each `nn.Sequential`; any other module is one
operation. Cuts are made where a single tensor goes from one operation to the next, before operations with
weights, and never between two that share some.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from tutti.errors import BadModel
from tutti.model_parallel.memory import PeakMemory
from tutti.training.evaluation import evaluating, undone
from tutti.training.precision import Arithmetic

COPIES: Final = 4
"""Of a weight a rank holds itself, its gradient, and with Adam two averages of that."""

OPERATIONS_PER_BYTE: Final = 32
"""Operations that a core does while it makes a byte of a result, about, in mobilenet, resnet and vgg."""

ROOM: Final = 1.25
"""Factor by which the share of a stage in the memory may exceed the largest share in the work."""

_SAME: Final = 1e-2
"""Relative difference that bfloat16 and other orders of summation may make."""


@dataclass(frozen=True)
class GraphBlock:
    """Consecutive operations of a model, with one tensor as input and one as output."""

    root: nn.Module
    nodes: tuple[Node, ...]  # the operations, in order
    before: Node  # the operation that makes the input
    last: Node  # the operation that makes the output
    # arithmetic operations of a forward pass, and `OPERATIONS_PER_BYTE` for the bytes of its results
    work: float
    made: int  # the bytes of its results

    @cached_property
    def layers(self) -> dict[str, Any]:
        """The modules that it calls, and the parameters and buffers that it uses, by name, in order."""
        names: dict[str, None] = {}
        for node in self.nodes:
            own = [one for one in node.all_input_nodes if one.op == "get_attr"]
            own += [node] if node.op == "call_module" else []
            names |= dict.fromkeys(str(one.target) for one in own)
        return {name: _named(self.root, name) for name in names}

    @property
    def state(self) -> list[Tensor]:
        """The parameters and buffers of its modules, which no other block may have."""
        modules = [layer for layer in self.layers.values() if isinstance(layer, nn.Module)]
        return [*self.module.parameters(), *(buffer for layer in modules for buffer in layer.buffers())]

    @property
    def nbytes(self) -> int:
        """The bytes of weights, gradients and optimizer state, and at most of backward's activations."""
        return self.made + COPIES * sum(p.nbytes for p in self.module.parameters())

    @property
    def trains(self) -> bool:
        """True if it has weights to train."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def then(self, following: GraphBlock) -> GraphBlock:
        """Return this block and the next as one."""
        nodes = (*self.nodes, *following.nodes)
        work, made = self.work + following.work, self.made + following.made
        return GraphBlock(self.root, nodes, self.before, following.last, work, made)

    @cached_property
    def module(self) -> nn.Module:
        """Return a module of the model's own layers that computes the block."""
        graph = Graph()
        known = {self.before: graph.placeholder("inputs")}

        def copied(node: Node) -> Node:
            if node not in known:
                assert node.op == "get_attr", "a single tensor goes into a block"
                known[node] = graph.node_copy(node)
            return known[node]

        for node in self.nodes:
            known[node] = graph.node_copy(node, copied)
        graph.output(known[self.last])
        return GraphModule(self.layers, graph)


def _named(root: nn.Module, name: str) -> Any:
    """Return the module, parameter or buffer with this name."""
    path, _, last = name.rpartition(".")
    return getattr(root.get_submodule(path), last)


def stages_of(
    module: nn.Module, inputs: Tensor, arithmetic: Arithmetic, count: int
) -> tuple[list[GraphBlock], list[Tensor]]:
    """Cut a model, which is unchanged, into `count` stages, the same on every rank and in every run.

    Return the stages, and the shapes, on the meta device, of the input of each and the output of the last.
    """
    blocks, edges = blocks_of(module, inputs, arithmetic)
    if len(blocks) < count:
        raise BadModel(
            f"the model has {len(blocks)} part{'' if len(blocks) == 1 else 's'} with weights between which "
            f"one tensor passes, and {count} stages need one each; use fewer ranks, another schedule or a "
            "deeper model"
        )
    cuts = balance([block.work for block in blocks], [block.nbytes for block in blocks], count)
    stages = [reduce(GraphBlock.then, blocks[part]) for part in cuts]
    return stages, [edges[node] for node in (*(stage.before for stage in stages), stages[-1].last)]


def balance(work: Sequence[float], nbytes: Sequence[int], count: int) -> list[slice]:
    """Cut blocks into consecutive stages that are even in work, as far as memory allows.

    Minimise the largest share of a stage in the work, or in the memory over `ROOM`. Each stage gets at least
    one block.
    """
    totals = [(sum(work) or 1.0, list(accumulate(work, initial=0.0)))]
    totals += [((sum(nbytes) or 1) * ROOM, list(accumulate(map(float, nbytes), initial=0.0)))]

    def load(first: int, last: int) -> float:
        return max((sums[last] - sums[first]) / total for total, sums in totals)

    # By the number of blocks: the largest load of a stage, and where the stages begin.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (load(0, end), (0,)) for end in range(1, len(work) + 1)
    }
    for stage in range(1, count):
        best = {
            end: min(
                (max(best[begin][0], load(begin, end)), (*best[begin][1], begin))
                for begin in range(stage, end)
            )
            for end in range(stage + 1, len(work) + 1)
        }
    return [slice(begin, end) for begin, end in pairwise((*best[len(work)][1], len(work)))]


def blocks_of(
    module: nn.Module, inputs: Tensor, arithmetic: Arithmetic
) -> tuple[list[GraphBlock], Mapping[Node, Tensor]]:
    """Return the blocks of a model, each with weights to train, and tensors that may pass between them."""
    graph = _graph_of(module)
    made = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(made, Node):
        raise BadModel(_refusal(module, "it does not return one tensor"))
    # A dimension that is as long by chance is not so for another number of samples.
    trial, other = (
        _tried(module, graph, some, arithmetic) for some in (inputs, torch.cat([inputs, inputs[:1]]))
    )
    edges = {node: tensor for node, tensor in trial.edges.items() if node in other.edges}
    if made not in edges:
        raise BadModel(_refusal(module, "the first dimension of its outputs is not the samples"))
    blocks: list[GraphBlock] = []
    for block in _smallest(module, graph, made, edges, trial):
        if blocks and not (block.trains and blocks[-1].trains):
            block = blocks.pop().then(block)
        blocks.append(block)
    return _joined(blocks), edges | {blocks[0].before: inputs.to("meta")}


def _smallest(
    module: nn.Module, graph: Graph, output: Node, edges: Mapping[Node, Tensor], trial: _TracedRun
) -> Iterator[GraphBlock]:
    """Yield blocks cut at every place where a single tensor passes, if that fits."""
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
        if place + 1 == len(nodes) or (len(alive) == 1 and alive <= edges.keys()):
            passing = output if place + 1 == len(nodes) else next(iter(alive))
            own = tuple(nodes[begin : place + 1])
            work, made = sum(trial.work[one] for one in own), sum(trial.made[one] for one in own)
            yield GraphBlock(module, own, before, passing, work, made)
            begin, before = place + 1, passing


class _TracedRun(Interpreter):
    """An interpreter that records the cost of each operation, in bytes and work.

    `edges` are the results whose first dimension is the samples, on the meta device.
    """

    def __init__(self, module: nn.Module, graph: Graph, samples: int, arithmetic: Arithmetic) -> None:
        super().__init__(module, graph=graph)
        self._samples, self._arithmetic = samples, arithmetic
        self.edges: dict[Node, Tensor] = {}
        self.made: dict[Node, int] = {}
        self.work: dict[Node, float] = {}

    @override
    def run_node(self, n: Node) -> Any:
        with FlopCounterMode(display=False) as flops, PeakMemory() as memory:
            found = super().run_node(n)
        self.made[n] = memory.made
        self.work[n] = flops.get_total_flops() + OPERATIONS_PER_BYTE * memory.made
        if isinstance(found, Tensor) and found.is_floating_point() and found.shape[:1] == (self._samples,):
            self.edges[n] = self._arithmetic.output(found).to("meta")
        return found


def _tried(module: nn.Module, graph: Graph, inputs: Tensor, arithmetic: Arithmetic) -> _TracedRun:
    """Run the operations; raise BadModel if their outputs differ from the model's."""
    trial = _TracedRun(module, graph, len(inputs), arithmetic)
    with evaluating(module), undone([module]), torch.no_grad():
        traced, wanted = arithmetic.forward(trial.run, inputs), arithmetic.forward(module, inputs)
    if not torch.allclose(traced, wanted, rtol=_SAME, atol=_SAME * float(wanted.abs().max())):
        raise BadModel(_refusal(module, "its trace gives other outputs than the model itself"))
    return trial


def _joined(blocks: list[GraphBlock]) -> list[GraphBlock]:
    """Join blocks that share a parameter or a module, with the blocks between them."""
    seen: dict[Tensor, int] = {}
    joined: list[GraphBlock] = []
    for block in blocks:
        first = min((seen[tensor] for tensor in block.state if tensor in seen), default=len(joined))
        whole = reduce(GraphBlock.then, [*joined[first:], block])
        joined[first:] = [whole]
        seen = {tensor: min(at, first) for tensor, at in seen.items()} | dict.fromkeys(whole.state, first)
    return joined


def _graph_of(module: nn.Module) -> Graph:
    """Return the operations of a model; BadModel if they differ between training and evaluation."""
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
        f"({why}). Put what depends on values or shapes into another module, write the model as an "
        "nn.Sequential, or use --parallel sharded"
    )


class _Tracer(Tracer):
    """Traces the forward methods of the model and of nn.Sequential."""

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward
