"""Checkpoints in files of other programs: read there on any number of ranks, and read back."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.exports.trained import CASES, TARGETS, Network, optimizer_of, train
from tests.torch_backend.process_groups import Ranks
from tutti.checkpoint.reading import open_checkpoint
from tutti.cli.main import main
from tutti.errors import BadCheckpoint
from tutti.exports import FORMS
from tutti.exports.sources import read_from
from tutti.optim.state import load
from tutti.strategies import Local

pytestmark = pytest.mark.usefixtures("nothing_beside")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that was stopped after four steps."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, 2)
    return folder


def restored(run: Path) -> tuple[Network, torch.optim.Optimizer]:
    """The network and the optimizer, as this package itself goes on with them."""
    saved, module = open_checkpoint(run / "checkpoints" / "latest").saved(0, 1), Network()
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = optimizer_of(module)
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(saved.joint.tensors[f"weights/{name}"])
        for name, buffer in module.named_buffers():
            buffer.copy_(saved.shared["training"]["buffers"][name])
    load(optimizer, names, saved, saved.shared["training"]["schedule"]["options"], copy=True)
    return module, optimizer


def whole(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[Any]]:
    """Copies of all tensors by name, and the param groups."""
    weights, state = get_state_dict(module, optimizer, options=WHOLE)
    kept = {f"{name}/{key}": x for name, one in state["state"].items() for key, x in one.items()}
    return {name: x.clone() for name, x in (weights | kept).items()}, copy.deepcopy(state["param_groups"])


WHOLE = StateDictOptions(full_state_dict=True)


def go_on(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Two more steps, with all samples on every rank."""
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(CASES), TARGETS).backward()
        optimizer.step()
    return whole(module, optimizer)[0]


# --- read by others


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[int, Ranks]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(Ranks(size)) for size in (1, 3)}


def a_program_of_torch(rank: int, folder: str) -> tuple[dict[str, Tensor], list[Any], dict[str, Tensor]]:
    """What it has loaded, and what becomes of that in two steps."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    module = Network()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    fully_shard(module, mesh=mesh)
    optimizer = optimizer_of(module)
    weights, state = get_state_dict(module, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    return *whole(module, optimizer), go_on(module, optimizer)


@pytest.mark.parametrize("ranks", [1, 3])
def test_sharded_ranks_of_a_plain_program_go_on_where_the_run_has_stopped(
    run: Path, tmp_path: Path, jobs: dict[int, Ranks], ranks: int
) -> None:
    folder = tmp_path / "exported"
    assert main(["export", str(run / "checkpoints" / "latest"), "--to", "dcp", "--out", str(folder)]) == 0
    module, optimizer = restored(run)
    tensors, groups, later = *whole(module, optimizer), go_on(module, optimizer)
    assert [group["lr"] for group in groups] == [0.01, 0.03]
    for loaded, options, trained in jobs[ranks].run(lambda rank: a_program_of_torch(rank, str(folder))):
        torch.testing.assert_close(loaded, tensors, rtol=0, atol=0)
        assert options == groups
        torch.testing.assert_close(trained, later, rtol=1e-12, atol=1e-14)


def test_one_file_for_torch_and_one_of_safetensors_have_the_whole_state_dictionary(
    run: Path, tmp_path: Path
) -> None:
    expected = restored(run)[0].state_dict()
    assert (
        main(["export", str(run / "checkpoints" / "latest"), "--to", "torch", "--out", f"{tmp_path}/a.pt"])
        == 0
    )
    assert main(["export", str(run), "--to", "safetensors", "--out", f"{tmp_path}/a.safetensors"]) == 0
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)
    assert found["last.weight"].data_ptr() == found["first.weight"].data_ptr()
    Network().load_state_dict(found)
    stored = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(expected) - set(stored) == {"last.weight"}
    torch.testing.assert_close(stored, {name: expected[name] for name in stored}, rtol=0, atol=0)


# --- and back


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_what_was_written_is_read_again(run: Path, tmp_path: Path, form: str) -> None:
    content = read_from(run / "checkpoints" / "latest")
    FORMS[form].write(tmp_path / "file", content)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    torch.testing.assert_close(read_from(tmp_path / "file").weights, content.weights, rtol=0, atol=0)


def test_a_run_is_evaluated_with_other_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, said = str(tmp_path / "run"), list[str]()
    words = ["--data", "digits", "-n", "1", "--threads", "1", "--steps", "30", "--checkpoint", "10 steps"]
    assert main(["train", "mlp", *words, "--out", folder]) == 0
    assert main(["export", folder, "--to", "safetensors", "--out", f"{tmp_path}/a"]) == 0
    newest = f"{folder}/checkpoints/step-00000010"
    assert main(["export", newest, "--to", "torch", "--out", f"{tmp_path}/b"]) == 0
    for weights in (
        [],
        ["--weights", f"{tmp_path}/a"],
        ["--weights", newest],
        ["--weights", f"{tmp_path}/b"],
    ):
        capsys.readouterr()
        assert main(["evaluate", folder, *weights]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2] == said[3]
    (tmp_path / "run" / "weights.safetensors").unlink()
    for words, expected in ([folder], 0), ([folder, "--weights", newest], 2), ([newest], 2):
        capsys.readouterr()
        assert main(["evaluate", *words]) == 0
        assert capsys.readouterr().out == said[expected]


# --- optimizers that are not one


def test_optimizers_of_workers_with_their_own_are_left_out_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", 2, lambda: Local(every=2))
    assert main(["export", str(tmp_path / "run"), "--to", "dcp", "--out", f"{tmp_path}/a"]) == 0
    assert "its own optimizer" in capsys.readouterr().err
    described = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert {name.partition(".")[0] for name in described} == {"model"}


# --- damage, and what others have made


def refused(place: Path, *words: str, to: str = "torch") -> None:
    """The command ends with exit code 2 and a sentence, and writes nothing."""
    with pytest.raises(BadCheckpoint) as caught:
        read_from(place)
    for word in words:
        assert word in str(caught.value)
    out = place.parent / "out"
    assert main(["export", str(place), "--to", to, "--out", str(out)]) == 2
    assert not out.exists()


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("new", [True, False])
def test_no_code_in_a_file_is_run(tmp_path: Path, new: bool) -> None:
    mark, place = tmp_path / "mark", tmp_path / "a.pt"
    torch.save(Malicious(mark), place, _use_new_zipfile_serialization=new)
    refused(place)
    assert not mark.exists()


def test_files_of_other_kinds(tmp_path: Path) -> None:
    refused(tmp_path, "has no weights")
    refused(tmp_path / "none", "does not exist")
    (tmp_path / "text").write_text("some words")
    refused(tmp_path / "text", "has no weights", "dcp, safetensors, torch")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").touch()
    refused(tmp_path / "d", "dcp_to_torch")
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("a", "b")
    refused(tmp_path / "zip", "torch.save")
    torch.save([1, 2], tmp_path / "list")
    refused(tmp_path / "list", "no state dictionary")
    (tmp_path / "half").write_bytes(safetensors.torch.save({"a": torch.ones(9)})[:60])
    refused(tmp_path / "half", "damaged")
