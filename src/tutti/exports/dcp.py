"""A folder of torch.distributed.checkpoint, which any number of ranks of a plain torch program loads.

    model.0.weight                       as FSDP2, DDP and plain modules name it
    optimizer.state.0.weight.exp_avg     as `get_optimizer_state_dict` names it
    optimizer.param_groups.0.lr          likewise

torch's own reader reads it, but for the metadata: unpickling them would run the code that they name.
"""

from __future__ import annotations

import math
import pickle
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from tutti.errors import BadCheckpoint
from tutti.exports.base import Exported, Form
from tutti.registry import part
from tutti.state import Values

METADATA: Final = ".metadata"

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"

_PATHS: Final = [
    (module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")
]

_KNOWN: Final[dict[tuple[str, str], Any]] = {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **dict.fromkeys(_PATHS, PurePath),
}
"""What the metadata may be made of, besides data types and the classes of torch's own module for them."""


@part("dcp")
class DcpForm(Form):
    """A folder for torch.distributed.checkpoint; it has room for the optimizer's state too."""

    suffix = ".dcp"
    with_optimizer = True

    @override
    @staticmethod
    def fits(path: Path) -> bool:
        return (path / METADATA).exists()

    @override
    @staticmethod
    def read(path: Path) -> Exported:
        try:
            return Exported(_weights(path))
        except (Exception, CheckpointException) as error:  # Of a foreign pickle, whatever there is.
            raise BadCheckpoint(
                f"{path} is damaged, or not what torch.distributed.checkpoint writes "
                f"({type(error).__name__}: {error}); save it again"
            ) from error

    @override
    @staticmethod
    def write(path: Path, content: Exported) -> None:
        state: Values = {MODEL: content.weights}
        if content.optimizer is not None:
            state[OPTIMIZER] = content.optimizer
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with _alone():
                save(state, storage_writer=filesystem.FileSystemWriter(unfinished), no_dist=True)
            unfinished.rename(path)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's warning of a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that makes nothing but metadata."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == metadata.__name__ and getattr(getattr(metadata, name, None), "__module__", "") == module:
            return getattr(metadata, name)
        if found is None:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which does not belong there")
        return found


class _Reader(filesystem.FileSystemReader):
    """torch's reader, but for the metadata."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return cast("Metadata", _MetadataUnpickler(BytesIO((Path(self.path) / METADATA).read_bytes())).load())


def _weights(folder: Path) -> dict[str, Tensor]:
    reader = _Reader(folder)
    described = reader.read_metadata()
    infos = {
        key: info
        for key, info in described.state_dict_metadata.items()
        if isinstance(info, TensorStorageMetadata)
    }
    names = _names_of_weights(infos, described.planner_data or {})
    if not names or len({*names.values()}) < len(names):
        raise ValueError("it has no weights, or several models with the same names")
    for key in names:
        if sum(math.prod(chunk.sizes) for chunk in infos[key].chunks) != math.prod(infos[key].size):
            raise ValueError(f"parts of '{key}' are missing")
    tensors = {key: torch.empty(infos[key].size, dtype=infos[key].properties.dtype) for key in names}
    with _alone():
        load(tensors, storage_reader=reader, no_dist=True)
    return {names[key]: tensor for key, tensor in tensors.items()}


def _names_of_weights(keys: Iterable[str], paths: Mapping[str, Iterable[object]]) -> dict[str, str]:
    """Return the names of the weights by their keys: what is under "model", else all but the optimizer's."""
    words = {key: [str(word) for word in paths.get(key, (key,))] for key in keys}
    under = {key: path[path.index(MODEL) + 1 :] for key, path in words.items() if MODEL in path[:-1]}
    others = {key: path for key, path in words.items() if path[0] not in (OPTIMIZER, "optim")}
    return {key: ".".join(path) for key, path in (under or others).items()}
