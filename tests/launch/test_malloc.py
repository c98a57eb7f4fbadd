"""What a rank frees it gets back at once, without the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
PAGES = (32 << 20) // 4096


def faults(*words: str, **environment: str) -> tuple[str, int]:
    """What `keep_memory` returned, and the page faults of the second use of 64 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="only glibc can be told to")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    kept, few = faults("keep")
    assert kept == "True"
    assert few < PAGES // 100
    _, many = faults()
    assert many > PAGES // 2


def test_a_user_s_own_settings_are_left_alone() -> None:
    kept, many = faults("keep", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "False"
    assert many > PAGES // 2
