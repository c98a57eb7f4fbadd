"""Settings of the heap and of OpenMP, as processes of their own see them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tutti.launch.runtime_settings import TUNABLES, start_settings

STEPS = """
import re, resource, torch
from pathlib import Path
from torch import nn
from tutti.launch.runtime_settings import keep_memory

def held():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

keep_memory()
for turn in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = bytearray(32 << 20)
    memory[::4096] = bytes(len(memory[::4096]))
    del memory
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
    nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 10),
).double()
optimizer = torch.optim.Adam(model.parameters())
notes = []
for step in range(300):
    if step == 50:
        before = held()
    inputs, targets = torch.randn(16, 1, 28, 28).double(), torch.randint(10, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    notes.append({"step": step, "loss": loss.detach()})
print(faults, (held() - before) >> 10)
"""
PAGES = (32 << 20) // 4096


def test_freed_memory_is_used_again_and_the_heap_of_a_rank_does_not_grow() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env=own | start_settings({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    faults, added_mib = map(int, done.stdout.split())
    assert faults < PAGES // 100
    assert added_mib < 4


@pytest.mark.parametrize(
    ("environ", "left"),
    [({}, {TUNABLES}), ({TUNABLES: "glibc.malloc.arena_max=1"}, set()), ({"MALLOC_ARENA_MAX": "1"}, set())],
)
def test_the_users_settings_stay(environ: dict[str, str], left: set[str]) -> None:
    assert start_settings(environ).keys() == left
