"""The training loop alone, trial after trial, on a rank like that of a farm's block; `farm.py` starts it."""

from __future__ import annotations

import json
from time import perf_counter

import numpy as np


def work(comm, payload: bytes) -> float:
    """Seconds that the steps of all trials take, without building models and optimizers (entry point)."""
    import torch
    from torch import optim
    from torch.nn.functional import cross_entropy

    from tutti import models

    given = json.loads(payload)
    with np.load(given["data"]) as file:
        inputs, targets = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"])
    seconds = 0.0
    for trial in range(given["trials"]):
        torch.manual_seed(trial)
        model = models.build("mlp", tuple(inputs.shape[1:]), 10, {"hidden": given["hidden"]})
        optimizer = optim.Adam(model.parameters(), fused=True)
        batches = list(torch.randperm(len(targets)).split(given["batch_size"]))
        began = perf_counter()
        for step in range(given["steps"]):
            rows = batches[step % len(batches)]
            optimizer.zero_grad()
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        seconds += perf_counter() - began
    return seconds
