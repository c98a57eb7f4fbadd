"""A folder of torch.distributed.checkpoint, which any number of ranks of a plain torch program loads.

    model.0.weight                       as FSDP2, DDP and plain modules name it
    optimizer.state.0.weight.exp_avg     as `get_optimizer_state_dict` names it
    optimizer.param_groups.0.lr          likewise

torch's own reader runs the code that such a folder names, and does not compare the check sums in it. This one
does the reverse.
"""

from __future__ import annotations

import math
import pickle
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from tutti.errors import BadCheckpoint
from tutti.exports.base import Exported, Form, load_tensors
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
        except Exception as error:  # Of a pickle of somebody else's, whatever there is.
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
            with warnings.catch_warnings():
                # That this is a single process is intended.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(state, storage_writer=filesystem.FileSystemWriter(unfinished), no_dist=True)
            unfinished.rename(path)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


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
    tensors = _tensors(folder, {key: infos[key] for key in names}, described.storage_data)
    return {names[key]: tensor for key, tensor in tensors.items()}


def _names_of_weights(keys: Iterable[str], paths: Mapping[str, Iterable[object]]) -> dict[str, str]:
    """Return the names of the weights by their keys: what is under "model", else all but the optimizer's."""
    words = {key: [str(word) for word in paths.get(key, (key,))] for key in keys}
    under = {key: path[path.index(MODEL) + 1 :] for key, path in words.items() if MODEL in path[:-1]}
    others = {key: path for key, path in words.items() if path[0] not in (OPTIMIZER, "optim")}
    return {key: ".".join(path) for key, path in (under or others).items()}


def _tensors(
    folder: Path, infos: Mapping[str, TensorStorageMetadata], places: Mapping[Any, Any]
) -> dict[str, Tensor]:
    """Put tensors together from their chunks, which lie in `places`."""
    promised = sum(math.prod(info.size) * info.properties.dtype.itemsize for info in infos.values())
    there = sum(path.stat().st_size for path in folder.iterdir())
    if promised > there:
        raise ValueError(f"it has {there:,} bytes, and {promised:,} of tensors are promised")
    found = {key: torch.empty(info.size, dtype=info.properties.dtype) for key, info in infos.items()}
    missing = {key: torch.ones(info.size, dtype=torch.bool) for key, info in infos.items()}
    for index, place in places.items():
        key, name = index.fqn, place.relative_path
        if key not in found:
            continue
        if PurePath(name).name != name:
            raise ValueError(f"'{key}' is said to lie in {name}, outside of the folder")
        with open(folder / name, "rb") as file:
            file.seek(place.offset)
            chunk = load_tensors(BytesIO(file.read(place.length)))
        where = tuple(
            slice(start, start + size) for start, size in zip(index.offset, chunk.shape, strict=True)
        )
        target = found[key][where]
        if (target.shape, target.dtype) != (chunk.shape, chunk.dtype):
            raise ValueError(f"a part of '{key}' has another shape or type than the metadata says")
        target.copy_(chunk)
        missing[key][where] = False
    gaps = [key for key, elements in missing.items() if elements.any()]
    if gaps:
        raise ValueError(f"parts of '{gaps[0]}' are missing")
    return found
