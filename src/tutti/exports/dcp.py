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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, Final

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

_KNOWN: Final = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PurePath,
    ("pathlib._local", "PosixPath"): PurePath,
    ("pathlib", "WindowsPath"): PurePath,
    ("pathlib._local", "WindowsPath"): PurePath,
}
"""Classes that the metadata may be made of, besides data types."""


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
        except (
            Exception,
            CheckpointException,
        ) as error:  # Of a pickle of somebody else's, whatever there is.
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
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which does not belong there")
        return _KNOWN[module, name]


class _Reader(filesystem.FileSystemReader):
    """torch's reader, with metadata that were read before."""

    def __init__(self, folder: Path, described: Metadata) -> None:
        super().__init__(folder)
        self._described = described

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._described


def _weights(folder: Path) -> dict[str, Tensor]:
    described = _MetadataUnpickler(BytesIO((folder / METADATA).read_bytes())).load()
    if not isinstance(described, Metadata):
        raise TypeError(f"its metadata is a {type(described).__name__}")
    infos = {
        key: info
        for key, info in described.state_dict_metadata.items()
        if isinstance(info, TensorStorageMetadata)
    }
    names = _names_of_weights(infos, described.planner_data or {})
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice or not names:
        raise ValueError(f"it has several models with '{twice[0]}'" if twice else "it has no weights")
    for place in described.storage_data.values():
        if PurePath(place.relative_path).name != place.relative_path:
            raise ValueError(f"a part is said to lie in {place.relative_path}, outside of the folder")
    for key in names:
        if sum(math.prod(chunk.sizes) for chunk in infos[key].chunks) != math.prod(infos[key].size):
            raise ValueError(f"parts of '{key}' are missing")
    tensors = {key: torch.empty(infos[key].size, dtype=infos[key].properties.dtype) for key in names}
    with _alone():
        load(tensors, storage_reader=_Reader(folder, described), no_dist=True)
    return {names[key]: tensor for key, tensor in tensors.items()}


def _names_of_weights(keys: Iterable[str], paths: Mapping[str, Iterable[object]]) -> dict[str, str]:
    """Return the names of the weights by their keys: what is under "model", else all but the optimizer's."""
    words = {key: [str(word) for word in paths.get(key, (key,))] for key in keys}
    under = {key: path[path.index(MODEL) + 1 :] for key, path in words.items() if MODEL in path[:-1]}
    others = {key: path for key, path in words.items() if path[0] not in (OPTIMIZER, "optim")}
    return {key: ".".join(path) for key, path in (under or others).items()}
