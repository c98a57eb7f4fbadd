"""Loops at random: what a program consists of, how one is run, and how Hypothesis draws one.

A program is a model or two, an optimizer for each, and for each batch a list of actions in any order that
plain torch takes. Its `run` is a loop like those that are written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from tests.own_loop.custom import Counting, Lars, Polyak, Rebinding
from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import gradients, weights

FEATURES, OUTPUTS = 5, 3


# What there is to choose from


class Headed(nn.Module):
    """A body that is used once or twice, two heads, and parameters of odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES)
        self.heads = nn.ModuleList([nn.Linear(FEATURES, OUTPUTS), nn.Linear(FEATURES, OUTPUTS, bias=False)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor, head: int = 0) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        if head == 1:
            hidden = torch.tanh(self.body(hidden))
        return self.heads[head](hidden) * self.scale + self.empty.sum()


class Plain(nn.Sequential):
    def forward(self, inputs: Tensor, head: int = 0) -> Tensor:
        return super().forward(inputs)


def _tied() -> nn.Module:
    model = Plain(
        nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
    )
    model[2].weight = model[0].weight
    return model


def _convolution() -> nn.Module:
    layers = (
        nn.Unflatten(1, (1, 1, FEATURES)),
        nn.Conv2d(1, 2, (1, 3)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    return Plain(*layers).to(memory_format=torch.channels_last)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4 * FEATURES, OUTPUTS)

    def forward(self, inputs: Tensor, head: int = 0) -> Tensor:
        return self.out(self.table((inputs.abs() * 3).long().clamp(max=5)).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "line": lambda: Plain(nn.Linear(FEATURES, OUTPUTS)),
    "net": lambda: Plain(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, OUTPUTS)),
    "headed": Headed,
    "tied": _tied,
    "convolution": _convolution,
    "words": Words,
    "normed": lambda: Plain(nn.Linear(FEATURES, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, OUTPUTS)),
}

_decay = st.sampled_from([0.0, 0.1])
_flag = st.booleans()
_ways = st.sampled_from([{}, {"foreach": True}, {"foreach": False}])
_ways_or_fused = st.sampled_from([{}, {}, {"foreach": True}, {"foreach": False}, {"fused": True}])


def _options(
    ways: st.SearchStrategy[dict[str, Any]] = _ways, **choices: Any
) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda a, b: {**a, **b}, st.fixed_dictionaries(choices), ways)


OPTIMIZERS: dict[str, tuple[type[Optimizer], float, st.SearchStrategy[dict[str, Any]]]] = {
    "SGD": (
        torch.optim.SGD,
        0.1,
        _options(_ways_or_fused, momentum=st.sampled_from([0.0, 0.9]), weight_decay=_decay, maximize=_flag),
    ),
    "Nesterov": (
        torch.optim.SGD,
        0.1,
        _options(_ways_or_fused, momentum=st.just(0.8), nesterov=st.just(True)),
    ),
    "Dampened": (torch.optim.SGD, 0.1, _options(momentum=st.just(0.8), dampening=st.just(0.3))),
    "Adam": (
        torch.optim.Adam,
        0.01,
        _options(_ways_or_fused, weight_decay=_decay, amsgrad=_flag, maximize=_flag),
    ),
    "AdamW": (torch.optim.AdamW, 0.01, _options(_ways_or_fused, weight_decay=_decay, amsgrad=_flag)),
    "Adagrad": (
        torch.optim.Adagrad,
        0.1,
        _options(
            _ways_or_fused,
            weight_decay=_decay,
            lr_decay=st.sampled_from([0.0, 0.1]),
            initial_accumulator_value=st.sampled_from([0.0, 0.5]),
        ),
    ),
    "Adadelta": (torch.optim.Adadelta, 1.0, _options(weight_decay=_decay)),
    "Adamax": (torch.optim.Adamax, 0.01, _options(weight_decay=_decay, maximize=_flag)),
    "NAdam": (torch.optim.NAdam, 0.01, _options(weight_decay=_decay, decoupled_weight_decay=_flag)),
    "RAdam": (torch.optim.RAdam, 0.01, _options(weight_decay=_decay, decoupled_weight_decay=_flag)),
    "RMSprop": (
        torch.optim.RMSprop,
        0.01,
        _options(weight_decay=_decay, momentum=st.sampled_from([0.0, 0.9]), centered=_flag),
    ),
    "Rprop": (torch.optim.Rprop, 0.01, _options(maximize=_flag)),
    "ASGD": (torch.optim.ASGD, 0.01, _options(weight_decay=_decay, t0=st.sampled_from([1e6, 1.0]))),
    "Adafactor": (torch.optim.Adafactor, 0.01, _options(weight_decay=_decay)),
    "Lars": (Lars, 0.1, st.just({})),
    "Counting": (Counting, 0.1, st.just({})),
    "Rebinding": (Rebinding, 0.1, st.just({})),
    "Polyak": (Polyak, 0.3, st.just({})),
}


# What a program consists of


@dataclass(frozen=True)
class Trained:
    """A model and its optimizer.

    Attributes:
        model: a key of `MODELS`.
        optimizer: a key of `OPTIMIZERS`.
        options: of the optimizer.
        groups: "one" param group for all parameters, "two" of different rates, or one for "each".
        late: how many parameters, the model's last, are put in a group by the action "add" alone.
        schedule: "none", or made "before" or "after" `distribute`.
    """

    model: str = "line"
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()
    groups: str = "one"
    late: int = 0
    schedule: str = "none"


Action = tuple[Any, ...]
"""Its name, the number of the model that it is about, and further values."""


@dataclass(frozen=True)
class Program:
    """A loop over some batches.

    Attributes:
        trained: the models; the second takes what the first makes.
        turns: for each batch, its number of samples and the actions.
        listing: whether the batches come as a list of tensors, or from a DataLoader.
        states: whether the optimizers' `state_dict` is compared too.
    """

    trained: tuple[Trained, ...]
    turns: tuple[tuple[int, tuple[Action, ...]], ...]
    states: bool = True

    def run(self, job: Job) -> Outcome:
        """Run the program; what it ended with."""
        run = _Run(self, job)
        generator = torch.Generator().manual_seed(1)
        batches = [
            torch.randn(size, FEATURES, generator=generator, dtype=torch.float64) for size, _ in self.turns
        ]
        for (inputs,), (_, actions) in zip(
            job.shard([(batch,) for batch in batches]), self.turns, strict=True
        ):
            run.inputs = inputs
            for name, number, *values in actions:
                getattr(run, name)(number, *values)
        found = {"weights": weights(*run.models), "seen": run.seen}
        if self.states:
            found["states"] = [dict(optimizer.state_dict()) for optimizer in run.optimizers]
        return found


class _Run:
    """The actions, and what they act on."""

    def __init__(self, program: Program, job: Job) -> None:
        self.job = job
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedules: list[lr_scheduler.LRScheduler | None] = []
        self.late: list[list[nn.Parameter]] = []
        self.saved: list[tuple[Any, Any] | None] = []
        self.seen: list[Any] = []
        self.held: list[list[Tensor | None]] = [[] for _ in program.trained]
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in program.trained]
        self.inputs = torch.zeros(0)
        for number, trained in enumerate(program.trained):
            torch.manual_seed(number)
            model = MODELS[trained.model]() if number == 0 else Plain(nn.Linear(OUTPUTS, OUTPUTS))
            model = model.double()
            parameters = list(model.parameters())
            cut = len(parameters) - min(trained.late, len(parameters) - 1)
            optimizer = _make(trained, parameters[:cut])
            schedule = _schedule(optimizer) if trained.schedule == "before" else None
            model, optimizer = job.distribute(model, optimizer)
            if trained.schedule == "after":
                schedule = _schedule(optimizer)
            self.models.append(model)
            self.optimizers.append(optimizer)
            self.schedules.append(schedule)
            self.late.append(parameters[cut:])
            self.saved.append(None)

    def loss(self, number: int, head: int) -> Tensor:
        """Mean over the samples, through as many models as `number` says."""
        scores = self.models[0](self.inputs, head)
        for model in self.models[1 : number + 1]:
            scores = model(torch.tanh(scores))
        targets = torch.stack(
            [self.inputs[:, 0], self.inputs[:, 1] * self.inputs[:, 2], self.inputs[:, 3]], 1
        )
        return (scores - targets).square().mean()

    def backward(self, number: int, head: int, scale: float) -> None:
        (self.loss(number, head) * scale).backward()

    def backward_twice(self, number: int, head: int) -> None:
        loss = self.loss(number, head)
        loss.backward(retain_graph=True)
        loss.backward()

    def backward_with_penalty(self, number: int, head: int) -> None:
        inputs = self.inputs = self.inputs.clone().requires_grad_()
        scores = self.models[0](inputs, head)
        if scores.grad_fn is None or self.models[0].__class__ is Words:
            return self.backward(number, head, 1.0)
        (slopes,) = torch.autograd.grad(scores.square().sum(), inputs, create_graph=True)
        return (slopes.square().sum(1).mean() + scores.square().mean()).backward()

    def step(self, number: int) -> None:
        self.optimizers[number].step()

    def step_with_closure(self, number: int) -> None:
        def closure() -> Tensor:
            self.optimizers[number].zero_grad()
            loss = self.loss(number, 0)
            loss.backward()
            return loss

        self.optimizers[number].step(closure)

    def zero(self, number: int, whose: str, to_none: bool) -> None:
        owner = self.models[number] if whose == "model" else self.optimizers[number]
        owner.zero_grad(set_to_none=to_none)

    def clip_norm(self, number: int) -> None:
        self.seen.append(nn.utils.clip_grad_norm_(self.models[number].parameters(), 0.3))

    def clip_value(self, number: int) -> None:
        # torch's function cannot take none at all.
        if any(parameter.grad is not None for parameter in self.models[number].parameters()):
            nn.utils.clip_grad_value_(self.models[number].parameters(), 0.1)

    def read(self, number: int) -> None:
        self.seen.append(gradients(self.models[number]))

    def edit_gradients(self, number: int) -> None:
        for parameter in self.models[number].parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach().square())

    def replace_gradients(self, number: int) -> None:
        for parameter in self.models[number].parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * parameter.grad.norm() + 0.1

    def drop_gradient(self, number: int) -> None:
        next(self.models[number].parameters()).grad = None

    def edit_weights(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.models[number].parameters():
                parameter.mul_(0.9)

    def clamp_weights(self, number: int) -> None:
        for parameter in self.models[number].parameters():
            parameter.data.clamp_(-0.3, 0.3)

    def schedule(self, number: int) -> None:
        schedule = self.schedules[number]
        if schedule is not None:
            schedule.step()
            self.seen.append(schedule.get_last_lr())

    def rate(self, number: int, factor: float) -> None:
        self.optimizers[number].param_groups[-1]["lr"] *= factor

    def evaluate(self, number: int) -> None:
        held = torch.ones(3, FEATURES, dtype=torch.float64)
        with torch.no_grad():
            for (inputs,) in self.job.shard([(held,), (held[:2],)]):
                self.models[0](inputs)

    def freeze(self, number: int) -> None:
        next(self.models[0].parameters()).requires_grad_(False)

    def unfreeze(self, number: int) -> None:
        next(self.models[0].parameters()).requires_grad_(True)

    def add(self, number: int) -> None:
        late, self.late[number] = self.late[number], []
        if late and self.schedules[number] is None:
            self.optimizers[number].add_param_group({"params": late, "lr": 0.003})

    def save(self, number: int) -> None:
        self.saved[number] = (
            copy.deepcopy(self.models[number].state_dict()),
            copy.deepcopy(self.optimizers[number].state_dict()),
        )

    def save_on_one_rank(self, number: int) -> None:
        if self.job.rank == 0:
            copy.deepcopy(self.models[number].state_dict())
            copy.deepcopy(self.optimizers[number].state_dict())

    def load(self, number: int, what: str) -> None:
        saved, optimizer = self.saved[number], self.optimizers[number]
        if saved is None or len(saved[1]["param_groups"]) != len(optimizer.param_groups):
            return
        if what != "optimizer":
            self.models[number].load_state_dict(copy.deepcopy(saved[0]))
        if what != "model":
            optimizer.load_state_dict(copy.deepcopy(saved[1]))

    def hold_gradients(self, number: int) -> None:
        self.held[number] = [parameter.grad for parameter in self.models[number].parameters()]
        self.seen.append(self.held[number])

    def let_go_of_gradients(self, number: int) -> None:
        for parameter in self.models[number].parameters():
            parameter.grad = None

    def add_held_gradients(self, number: int) -> None:
        for parameter, held in zip(self.models[number].parameters(), self.held[number], strict=False):
            if held is not None:
                parameter.grad = held if parameter.grad is None else parameter.grad + held

    def step_by_some(self, number: int) -> None:
        """An update by the samples that are chosen, of which a rank may have none."""
        self.zero(number, "optimizer", True)
        chosen = self.inputs[:, 0] > 0.5
        if chosen.any():
            scores = self.models[0](self.inputs)
            (scores.square().mean(1) * chosen).mean().backward()
        self.step(number)

    def backward_in_no_grad(self, number: int, head: int) -> None:
        with torch.no_grad(), torch.enable_grad():
            self.backward(number, head, 1.0)

    def scaled_step(self, number: int, factor: float) -> None:
        """An update by a scaled loss; where the factor is inf, without effect but on the scale."""
        scaler, optimizer = self.scalers[number], self.optimizers[number]
        if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
            # A first step that is left out leaves torch's momentum without any value.
            factor = 1.0
        optimizer.zero_grad()
        scaler.scale(self.loss(number, 0) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        self.seen.append(scaler.get_scale())

    def noise(self, number: int) -> None:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.models[number].parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1
                )

    def inner_loop(self, number: int) -> None:
        """Another loop over the samples of a task, inside of this one."""
        outer = self.inputs
        held = torch.linspace(-1, 1, 5 * FEATURES, dtype=torch.float64).view(5, FEATURES)
        for (inputs,) in self.job.shard([(held,), (held[:2],)]):
            self.inputs = inputs
            self.zero(number, "optimizer", True)
            self.backward(number, 0, 1.0)
            self.step(number)
        self.inputs = outer

    def copy_optimizer(self, number: int) -> None:
        self.seen.append(dict(copy.deepcopy(self.optimizers[number]).state_dict()))

    def reset_state(self, number: int) -> None:
        self.optimizers[number].state.clear()

    def copy_model(self, number: int) -> None:
        copied = copy.deepcopy(self.models[number])
        self.seen.append(weights(copied))


def _make(trained: Trained, parameters: list[nn.Parameter]) -> Optimizer:
    kind, rate, _ = OPTIMIZERS[trained.optimizer]
    if trained.groups == "one":
        return kind(parameters, lr=rate, **dict(trained.options))
    parts = [parameters[:1], parameters[1:]] if trained.groups == "two" else [[p] for p in parameters]
    groups = [{"params": part, "lr": rate / (number + 1)} for number, part in enumerate(parts) if part]
    return kind(groups, lr=rate, **dict(trained.options))


def _schedule(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)


# How one is drawn


def _values(name: str) -> tuple[st.SearchStrategy[Any], ...]:
    head = st.integers(0, 1)
    return {
        "backward": (head, st.sampled_from([1.0, 0.5])),
        "backward_twice": (head,),
        "backward_with_penalty": (head,),
        "zero": (st.sampled_from(["optimizer", "model"]), st.booleans()),
        "rate": (st.sampled_from([0.5, 2.0]),),
        "backward_in_no_grad": (head,),
        "scaled_step": (st.sampled_from([1.0, 0.5, float("inf")]),),
        "load": (st.sampled_from(["both", "model", "optimizer"]),),
    }.get(name, ())


ACTIONS = (
    "backward",
    "step",
    "zero",
    "backward_twice",
    "backward_with_penalty",
    "step_with_closure",
    "clip_norm",
    "clip_value",
    "read",
    "edit_gradients",
    "replace_gradients",
    "drop_gradient",
    "edit_weights",
    "clamp_weights",
    "schedule",
    "rate",
    "evaluate",
    "freeze",
    "unfreeze",
    "add",
    "save",
    "save_on_one_rank",
    "load",
    "copy_model",
    "hold_gradients",
    "let_go_of_gradients",
    "add_held_gradients",
    "step_by_some",
    "backward_in_no_grad",
    "scaled_step",
    "noise",
    "inner_loop",
    "copy_optimizer",
    "reset_state",
)
"""All that a program can do."""


@st.composite
def trained_models(draw: st.DrawFn, optimizers: Sequence[str]) -> Trained:
    optimizer = draw(st.sampled_from(optimizers))
    return Trained(
        model=draw(st.sampled_from(list(MODELS))),
        optimizer=optimizer,
        options=tuple(draw(OPTIMIZERS[optimizer][2]).items()),
        groups=draw(st.sampled_from(["one", "two", "each"])),
        late=draw(st.integers(0, 2)),
        schedule=draw(st.sampled_from(["none", "before", "after"])),
    )


@st.composite
def actions(draw: st.DrawFn, names: Sequence[str], models: int) -> Action:
    name = draw(st.sampled_from(names))
    return (name, draw(st.integers(0, models - 1)), *(draw(value) for value in _values(name)))


@st.composite
def programs(draw: st.DrawFn, without: Collection[str] = ()) -> Program:
    """Programs of up to four batches and up to two models that make at least one update.

    Args:
        draw: Hypothesis'.
        without: keys of `OPTIMIZERS`, and actions, that are left out.
    """
    optimizers = [name for name in OPTIMIZERS if name not in without]
    names = [name for name in ACTIONS if name not in without]
    trained = tuple(draw(st.lists(trained_models(optimizers), min_size=1, max_size=2)))
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        drawn = draw(st.lists(actions(names, len(trained)), max_size=6))
        turns.append((draw(st.integers(1, 7)), tuple(drawn)))
    size, drawn = turns[-1]
    last = len(trained) - 1
    update = (("zero", last, "model", True), ("backward", last, 0, 1.0), ("step", last))
    turns[-1] = (size, (*drawn, *update))
    return Program(trained, tuple(turns), draw(st.booleans()))
