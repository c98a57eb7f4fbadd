"""Tensor parallelism by hand: `tutti run -n 2 examples/split_weights.py`.

Each rank has some rows of every weight matrix and computes these outputs; all_gather stacks them. The program
compares this, and what tutti does, with the undivided model. The lesson: docs/lessons/classroom.md
"""

import copy

import torch
import tutti
from sklearn.datasets import load_digits
from torch import nn
from tutti.model_parallel.tensor import split

comm = tutti.init()


class Stack(torch.autograd.Function):
    """Stack the outputs of all ranks; backward, a rank keeps the gradient of its own rows."""

    @staticmethod
    def forward(context, own):
        context.rows = slice(comm.rank * len(own), (comm.rank + 1) * len(own))
        whole = own.new_zeros(comm.size * len(own), own.shape[1])
        whole[context.rows] = own
        comm.all_gather(whole.view(-1))
        return whole

    @staticmethod
    def backward(context, gradient):
        return gradient[context.rows]


class Copy(torch.autograd.Function):
    """Copy the inputs to all ranks; backward, sum their gradients over the ranks."""

    @staticmethod
    def forward(context, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total.view(-1))
        return total


class SplitLinear(nn.Module):
    """A rank's rows of a linear layer."""

    def __init__(self, layer):
        super().__init__()
        rows = layer.out_features // comm.size  # which has no remainder
        own = slice(comm.rank * rows, (comm.rank + 1) * rows)
        self.weight = nn.Parameter(layer.weight.detach()[own].clone())
        self.bias = nn.Parameter(layer.bias.detach()[own].clone())

    def forward(self, inputs):
        return Stack.apply(self.weight @ Copy.apply(inputs).T + self.bias[:, None]).T


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model(inputs).detach(), sum(weight.numel() for weight in model.parameters())


digits = load_digits()
inputs, targets = torch.tensor(digits.data / 16), torch.tensor(digits.target)
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(64, 100), nn.Sigmoid(), nn.Linear(100, 10)).double()
by_hand = nn.Sequential(*(SplitLinear(part) if isinstance(part, nn.Linear) else part for part in whole))
by_tutti = copy.deepcopy(whole)
split(by_tutti, comm)
wanted, numbers = train(whole)
for name, model in {"by hand": by_hand, "by tutti": by_tutti}.items():
    outputs, own = train(model)
    if comm.rank == 0:
        difference = (outputs - wanted).abs().max().item()
        print(f"{name}: rank 0 of {comm.size} has {own:,} of {numbers:,} parameters;", end=" ")
        print(f"after 20 steps the outputs differ by {difference:.1e}")
