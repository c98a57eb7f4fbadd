"""torch's compiler is imported when it is used, and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOSS = """
import sys
from torch.nn.functional import cross_entropy

def loss(outputs, targets):
    if cross_entropy(outputs, targets) and "torch._dynamo.utils" in sys.modules:
        raise RuntimeError("the compiler has been imported")
    return cross_entropy(outputs, targets)
"""

COMPILED = """
import sys
import torch
from tutti.optim.without_compiler import defer_compiler, plain_step

defer_compiler()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.RMSprop(model.parameters())
optimizer.zero_grad()
model(torch.ones(4, 3)).sum().backward()
plain_step(optimizer)()
assert "torch._dynamo.utils" not in sys.modules
torch.compile(optimizer.step, backend="eager")()
optimizer.zero_grad()
assert "torch._dynamo.utils" in sys.modules
optimizer.step()
"""


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_training_leaves_the_compiler_out(tmp_path: Path, optimizer: str) -> None:
    program = tmp_path / "checked.py"
    program.write_text(LOSS)
    options = f"train mlp --data digits -n 2 --steps 3 --optimizer {optimizer}".split()
    options += ["--loss", f"{program}:loss", "--out", str(tmp_path / "run")]
    # Processes forked from the tests' own server have it.
    subprocess.run([sys.executable, "-m", "tutti.cli.main", *options], timeout=120, check=True)


def test_deferred_methods_are_compiled_later() -> None:
    subprocess.run([sys.executable, "-c", COMPILED], timeout=120, check=True)
