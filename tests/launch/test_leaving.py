"""The end of a process that was forked."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.preloaded import interpreter

PROGRAM = """
import os, sys, weakref
from types import ModuleType
from tutti.launch.leaving import leave, prepare_fork

class Thing:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        write(self.name)

def write(text):
    print("parent" if os.getpid() == parent else "fork", text, flush=True)

def holding(name):
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = "/there/" + name
    module.thing = Thing(name)

parent = os.getpid()
weakref.finalize(ModuleType, write, "given before")
holding("imported before")
prepare_fork()
if os.fork() == 0:
    weakref.finalize(ModuleType, write, "given after")
    holding("imported after")
    leave()
os.wait()
os._exit(0)
"""


def test_a_fork_ends_what_it_has_begun_and_leaves_the_rest_to_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([*interpreter(), str(program)], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["fork given after", "fork imported after"]
