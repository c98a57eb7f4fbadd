"""Programs of pages do what the pages say."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from torch import nn

import tutti
from tests.contracts import strategy as contract
from tests.docs.programs import blocks_of, follow
from tests.preloaded import command
from tutti.cli.main import main
from tutti.errors import BadData
from tutti.launch import world
from tutti.models import build
from tutti.own_loop import distribute
from tutti.strategies import Strategy, named
from tutti.training.augmentations import SampleRandom
from tutti.training.sample_words import keys_of


def run(page: str, words: str, names: dict[str, Any] | None = None, **replaced: str) -> dict[str, Any]:
    """Run the only program of a page with these words; its names."""
    (code,) = [one.code for one in blocks_of(page) if one.language == "python" and words in one.code]
    for old, new in replaced.items():
        code = code.replace(old, new)
    found = {} if names is None else names
    exec(compile(code, "page", "exec"), found)
    return found


def test_a_callback_stops_a_run() -> None:
    names = run(
        "watching.md",
        "class Gap",
        None,
        **{'"digits", ': '"digits", workers=1, epochs=2, ', "most=2": "most=0"},
    )
    assert len(names["gap"].gaps) == 1
    assert "the losses are" in names["result"].summary.ended_early


def test_a_transform_changes_each_sample_in_its_own_way() -> None:
    random = SampleRandom(keys_of(torch.arange(3), seed=0, epoch=0, use=1), torch.device("cpu"))
    jitter = run("augmentation.md", "def jitter")["jitter"]
    inputs, targets = jitter(torch.zeros(3, 1, 4, 4), torch.arange(3), random)
    assert torch.equal(targets, torch.arange(3))
    assert len({tuple(sample.flatten().tolist()) for sample in inputs}) == 3


def test_a_model_and_a_format_of_the_user() -> None:
    model = build(run("adding-parts.md", "def perceptron")["perceptron"], (1, 8, 8), 10, {"hidden": 5})
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_format_of_the_user_reads_its_files_and_names_what_is_there(tmp_path: Path) -> None:
    form, path = run("adding-parts.md", "class Matlab")["Matlab"], tmp_path / "jets.mat"
    scipy.io.savemat(path, {"x": np.ones((4, 3)), "kind": np.arange(4)})
    inputs, targets = form.read(path, {"targets": "kind"}).parts["train"]
    assert (inputs.shape, targets.tolist()) == ((4, 3), [0, 1, 2, 3])
    with pytest.raises(BadData, match="x, kind"):
        form.read(path, {})


def test_an_exported_program_takes_any_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(
        "models.md",
        "torch.export.save",
        {"torch": torch, "model": nn.Linear(3, 2), "inputs": torch.zeros(4, 3)},
    )
    assert torch.export.load("net.pt2").module()(torch.zeros(7, 3)).shape == (7, 2)


def test_a_trained_run_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tutti.train("mlp", "digits", workers=1, epochs=1, out="runs/NAME", quiet=True)
    names = run("after-training.md", "tutti.load(", {"images": np.zeros((3, 8, 8), np.uint8), "torch": torch})
    assert names["classes"].shape == (3,)
    np.testing.assert_allclose(names["chances"].sum(1), 1, rtol=1e-6)


def test_a_search_of_scikit_learn_finds_a_network_that_reads_digits() -> None:
    search = run("scikit-learn.md", "search")["search"]
    assert search.best_params_["classifier__lr"] == 0.01
    assert search.best_score_ > 0.85


def test_a_rank_that_raises_ends_the_job_and_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follow([block for block in blocks_of("faq.md") if block.language == "python" and block.saved_as], {})
    done = subprocess.run(
        [*command(), "run", "-n", "2", "fails.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "RuntimeError: no more" in done.stderr.splitlines()[-1]


STRATEGY = [block.code for block in blocks_of("write-your-own-strategy.md") if block.language == "python"]
_names: dict[str, Any] = {}
exec(compile(STRATEGY[2], "page", "exec"), _names)


@pytest.fixture
def strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Strategy]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "majority.py").write_text(STRATEGY[0])
    return named(f"{tmp_path}/majority.py:MajorityVote")


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_strategy_of_the_user_does_what_strategies_must(
    check: Callable[[type[Strategy], contract.Setting], None], strategy: type[Strategy]
) -> None:
    check(strategy, _names["SETTING"])


def test_a_strategy_of_the_user_trains(
    strategy: type[Strategy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    exec(compile(STRATEGY[1], "page", "exec"), {"MajorityVote": strategy})
    monkeypatch.chdir(tmp_path)
    (line,) = [one.code for one in blocks_of("write-your-own-strategy.md") if one.language == "bash"]
    assert main([*shlex.split(line)[1:], "-n", "2"]) == 0
    accuracy = re.search(r"accuracy\D*([\d.]+)", capfd.readouterr().out.partition("\ntest:")[2])
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"[\d.,]+(?:e-\d+)?", "#", text).split())


@pytest.mark.timeout(300)
def test_a_reader_of_the_tutorial_gets_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Another test may have closed the communicator of a loop of its own.
    monkeypatch.setattr(distribute, "_loop", None)
    monkeypatch.setattr(world, "_world", None)
    blocks = blocks_of("tutorial.md")
    follow(blocks, {})
    printed = capfd.readouterr().out
    shown = [line for block in blocks if block.language == "text" for line in block.code.splitlines()]
    wanted = {without_numbers(line) for line in shown if line not in ("", "...")}
    assert wanted - {without_numbers(line) for line in printed.splitlines()} == set()
    losses = r"epoch \d: loss ([\d.]+)"
    on_two_ranks = [float(loss) for loss in re.findall(rf"^{losses}$", printed, re.MULTILINE)]
    runpy.run_path("loop.py")
    on_one = [float(loss) for loss in re.findall(losses, capfd.readouterr().out)]
    assert on_one == pytest.approx(on_two_ranks, abs=0.0011), "which are rounded to three digits"
