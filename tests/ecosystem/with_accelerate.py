"""Accelerate's plain example, in short: with_accelerate.py FOLDER BACKENDS CHECKS

On the CPU Accelerate knows gloo alone, but takes the process group that it finds.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import tutti  # noqa: F401
from tests.ecosystem.outcomes import main

SAMPLES = 70


def train_and_gather() -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    samples = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)), torch.arange(SAMPLES))
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(samples, batch_size=8, shuffle=True)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(2):
        for inputs, targets, _ in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    gathered = [accelerator.gather_for_metrics((model(inputs), indices)) for inputs, _, indices in loader]
    indices = torch.cat([found for _, found in gathered])
    assert sorted(indices.tolist()) == list(range(SAMPLES))
    accelerator.wait_for_everyone()
    outputs = torch.cat([found.detach() for found, _ in gathered])[indices.argsort()]
    trained = accelerator.get_state_dict(model)
    AcceleratorState._reset_state(True)  # else the next one would take this one's process group
    return {"outputs": outputs, **trained}


if __name__ == "__main__":
    main(globals())
