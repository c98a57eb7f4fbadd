"""A folder of torch.distributed.checkpoint, which any number of ranks of a plain torch program loads.

model.0.weight                       as FSDP2, DDP and plain modules name it
optimizer.state.0.weight.exp_avg     as `get_optimizer_state_dict` names it
optimizer.param_groups.0.lr          likewise
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from tutti.errors import BadCheckpoint
from tutti.exports.base import Exported, Form
from tutti.registry import part
from tutti.state import Values


@part("dcp")
class DcpForm(Form):
    """A folder for torch.distributed.checkpoint; it has room for the optimizer's state too."""

    suffix = ".dcp"
    with_optimizer = True

    @override
    @staticmethod
    def fits(path: Path) -> bool:
        return (path / ".metadata").exists()

    @override
    @staticmethod
    def read(path: Path) -> Exported:
        # Reading its metadata would run the code that they name.
        raise BadCheckpoint(
            f"{path} is a folder of torch.distributed.checkpoint, which tutti only writes; if you trust it, "
            f"convert it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} model.pt"
        )

    @override
    @staticmethod
    def write(path: Path, content: Exported) -> None:
        state: Values = {"model": content.weights}
        if content.optimizer is not None:
            state["optimizer"] = content.optimizer
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(state, storage_writer=FileSystemWriter(unfinished), no_dist=True)
            unfinished.rename(path)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
