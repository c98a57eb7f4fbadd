"""What a rank frees it gets back at once, without the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tutti.launch.malloc import TUNABLES, start_settings

PROGRAM = """
import resource, sys
from tutti.launch.malloc import keep_memory
kept = keep_memory() if "keep" in sys.argv else None
for turn in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = bytearray(32 << 20)
    memory[::4096] = bytes(len(memory[::4096]))
    del memory
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults)
"""
STEPS = """
import re, sys, torch
from pathlib import Path
from torch import nn
from tutti.launch.malloc import keep_memory

def held():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

keep_memory()
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
print((held() - before) >> 10)
"""
PAGES = (32 << 20) // 4096


def printed(program: str, *words: str, **environment: str) -> str:
    """What a program prints that decides itself how to allocate."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def faults(*words: str, **environment: str) -> tuple[str, int]:
    """What `keep_memory` returned, and the page faults of the second use of 32 MiB."""
    kept, count = printed(PROGRAM, *words, **environment).split()
    return kept, int(count)


@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="only glibc can be told to")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    kept, few = faults("keep")
    assert kept == "True"
    assert few < PAGES // 100
    _, many = faults()
    assert many > PAGES // 2


def test_the_heap_of_a_rank_stays_whole_while_it_trains() -> None:
    assert int(printed(STEPS, **start_settings({}))) < 4, "MiB that 250 steps alike have added"


@pytest.mark.parametrize("name", [TUNABLES, "MALLOC_ARENA_MAX"])
def test_what_a_user_says_of_the_heap_stays(name: str) -> None:
    assert start_settings({name: "glibc.malloc.arena_max=1"}) == {}
