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
from tutti.lazy_compiler import defer_compiler

defer_compiler()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())
optimizer.zero_grad()
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
assert "torch._dynamo.utils" not in sys.modules
{use}
assert "torch._dynamo.utils" in sys.modules
optimizer.step()
"""


def test_training_leaves_the_compiler_out(tmp_path: Path) -> None:
    program = tmp_path / "checked.py"
    program.write_text(LOSS)
    options = ["-n", "2", "--steps", "3", "--loss", f"{program}:loss", "--out", str(tmp_path / "run")]
    # Processes forked from the tests' own server have it.
    command = [sys.executable, "-m", "tutti.cli.main", "train", "mlp", "--data", "digits", *options]
    subprocess.run(command, timeout=120, check=True)


@pytest.mark.parametrize(
    "use",
    [
        "assert torch.compile(model, backend='eager')(torch.ones(4, 3)).shape == (4, 2)",
        "import torch._dynamo.config; assert torch._dynamo.config.recompile_limit",
        "from torch._dynamo import reset; reset()",
        "torch.compile(optimizer.step, backend='eager')()",
    ],
)
def test_using_the_compiler_imports_it(use: str) -> None:
    subprocess.run([sys.executable, "-c", COMPILED.format(use=use)], timeout=120, check=True)
