"""The loops that pages show end on two ranks as plain torch does; the losses that they show are right."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.docs.programs import blocks_of
from tests.preloaded import command
from tutti.data import DataSet, Part
from tutti.training.losses import LossBatch, named_loss

pytestmark = pytest.mark.timeout(300)


def block(page: str, words: str) -> str:
    """The only program of a page with these words."""
    (code,) = [one.code for one in blocks_of(page) if one.language == "python" and words in one.code]
    return code


OWN_LOOP = """
import torch, tutti
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs, targets = torch.randn(23, 4), torch.randint(0, 3, (23,))
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = validation = DataLoader(TensorDataset(inputs, targets), 6)
total, samples = 0.0, 0
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
"""
SETTING = "import tutti\n" + block("from-horovod-ddp.md", "TensorDataset")
DIFFS = [
    "".join(line[1:] + "\n" for line in one.code.splitlines() if not line.startswith("-"))
    for one in blocks_of("from-horovod-ddp.md")
    if one.language == "diff"
]
LOOPS = dict(
    zip(("horovod", "ddp", "accelerate"), (SETTING + p for p in DIFFS if "distribute(" in p), strict=True)
)
LOOPS |= {
    "usual": OWN_LOOP
    + block("own-loop.md", "import tutti\n\nmodel, optimizer = tutti.distribute(model, optimizer)\n"),
    "plateau": OWN_LOOP + block("own-loop.md", "# ReduceLROnPlateau") + "model.bias.data += scheduler.best\n",
    "sums": OWN_LOOP + block("own-loop.md", 'reduction="sum")\nfor'),
}


def weights_of(program: str, folder: Path) -> list[list[Tensor]]:
    """The weights at the end of a program, in float64, on each of two ranks."""
    first, last = (
        "import torch\ntorch.set_default_dtype(torch.float64)\n",
        "\nimport tutti\nrank = tutti.init().rank\n",
    )
    last += "torch.save([one.detach() for one in model.parameters()], f'weights{rank}.pt')\n"
    (folder / "loop.py").write_text(first + program + last)
    words = [*command(), "run", "-n", "2", "loop.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]


def plain_weights_of(program: str) -> list[Tensor]:
    """The same of a program without tutti, in this process."""
    text = re.sub(
        r"^import tutti\n|^model, optimizer = tutti.*\n|^correct = tutti\.total.*\n",
        "",
        program,
        flags=re.M,
    )
    text = re.sub(r"tutti\.shard\((\w+)\)", r"\1", text).replace("tutti.init().rank == 0", "True")
    text = re.sub(r"tutti\.total\((\(targets != 0\)\.sum\(\))\)", r"\1", text)
    text = re.sub(r"tutti\.mean\((.*), samples\)\)", r"\1)", text).replace(
        "import torch, tutti", "import torch"
    )
    assert "tutti" not in text
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        names: dict[str, nn.Module] = {}
        exec(compile(text, "page", "exec"), names)
    finally:
        torch.set_default_dtype(before)
    return [one.detach() for one in names["model"].parameters()]


def assert_same(found: list[list[Tensor]], wanted: list[Tensor]) -> None:
    for of_rank in found:
        for mine, other in zip(of_rank, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_on_two_ranks_as_plain_torch_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_same(weights_of(LOOPS[name], tmp_path), plain_weights_of(LOOPS[name]))


def test_a_loop_that_is_started_again_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    loop = (
        block("own-loop.md", 'tutti.checkpoints("')
        .replace("% 500", "% 10")
        .replace("epoch=epoch", "epoch=epoch, wait=True")
    )
    weights_of(OWN_LOOP + loop.replace("0), 10)", "0), 3)"), tmp_path)
    assert [path.name for path in (tmp_path / "runs/digits").glob("step-*")] == ["step-00000010"]
    usual = LOOPS["usual"].removeprefix(OWN_LOOP)
    found = weights_of(OWN_LOOP + loop + "assert step == 40\n", tmp_path)
    assert_same(found, plain_weights_of(OWN_LOOP + usual * 10))
    weights_of(OWN_LOOP + loop + block("own-loop.md", "with stoppable():"), tmp_path)


def test_a_program_that_keeps_ddp_runs_on_two_ranks(tmp_path: Path) -> None:
    (program,) = [one for one in DIFFS if "init_process_group" in one]
    assert len(weights_of(SETTING + program + "model(dataset[:8][0]).sum().backward()\n", tmp_path)) == 2


def test_no_loop_is_left_out() -> None:
    assert (
        sum("tutti.shard(" in one.code for one in blocks_of("own-loop.md") if one.language == "python") == 5
    )
    assert len(DIFFS) == 3 + 1


def test_losses_of_the_page_are_what_it_says() -> None:
    names: dict[str, object] = {"torch": torch, "nn": nn}
    exec(block("losses.md", "def with_aid") + block("losses.md", "def per_token"), names)
    batch = LossBatch(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert names["with_aid"]((torch.zeros(2, 2), torch.ones(2)), batch).item() == pytest.approx(
        math.log(2) + 0.1
    )
    dataset = DataSet("", Part(batch.inputs, batch.targets), None, None, 2, ())
    assert named_loss(names["with_aid"], dataset).whole
    outputs, targets = torch.randn(5, 3, 7), torch.arange(35).reshape(5, 7) % 3
    total, weight = names["per_token"](outputs, targets)
    wanted = nn.functional.cross_entropy(outputs, targets, ignore_index=0)
    torch.testing.assert_close(total / weight, wanted)
