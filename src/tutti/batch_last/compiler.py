"""The compiled kernels: made once by this machine's C compiler, for its processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from tutti.errors import BadOption
from tutti.records.files import cache_folder

_SOURCE: Final = Path(__file__).with_name("kernels.c")
_FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
INTEGERS: Final = {"float": "int32_t", "double": "int64_t"}
"""The types in C that the kernels are compiled for, and the integers of the same sizes."""

_pointer, _size = ctypes.c_void_p, ctypes.c_int64
_REMEDY: Final = "or use --layout channels_last"


class Shape(ctypes.Structure):
    """The sizes of a convolution or a pooling, for the kernels."""

    _fields_ = tuple(
        (name, _size)
        for name in (
            *("samples", "inputs", "height", "width", "outputs", "rows", "columns"),
            *("kernel_rows", "kernel_columns", "row_stride", "column_stride"),
            *("row_padding", "column_padding", "groups"),
        )
    )


_ARGUMENTS: Final = {"convolve": 5, "input_gradient": 4, "weight_gradient": 4, "pool": 3, "pool_gradient": 3}
"""The kernels, and the tensors that each is given besides a shape."""


@cache
def kernels(real: str) -> ctypes.CDLL:
    """Return the kernels for "float" or "double", compiled at this user's first use on such a processor."""
    path = compiled(real)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BadOption(
            f"the kernels of --layout batch_last cannot be loaded: {error}; remove the file, "
            f"set TUTTI_CACHE to a folder from which code may be run, {_REMEDY}"
        ) from error
    for name, tensors in _ARGUMENTS.items():
        kernel = getattr(library, name)
        kernel.argtypes, kernel.restype = (ctypes.POINTER(Shape), *[_pointer] * tensors), None
    library.lanes.argtypes, library.lanes.restype = (), _size
    return library


def compiled(real: str) -> Path:
    """Return the file of the kernels for a type; see `kernels`."""
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), ""))
    if not compiler:
        raise BadOption(
            "--layout batch_last needs a C compiler, and there is none: install one (apt-get install gcc), "
            f"name one in the environment (CC=...), {_REMEDY}"
        )
    flags = (*_FLAGS, f"-DREAL={real}", f"-DINTEGER={INTEGERS[real]}")
    made_of = (_SOURCE.read_text(), *compiler, *flags, platform.machine(), _processor())
    name = f"{real}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    folder = cache_folder() / f"kernels-{os.getuid()}"
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, found = folder.stat().st_uid, path.exists()
    except OSError as error:
        raise _no_room(folder, error) from error
    if owner != os.getuid():
        raise BadOption(
            f"{folder} belongs to another user; set TUTTI_CACHE to one of your folders, {_REMEDY}"
        )
    if not found:
        _compile([*compiler, *flags], path)
    return path


def _compile(command: list[str], path: Path) -> None:
    """Compile into a file that appears complete or not at all, as others may look for it meanwhile."""
    try:
        room = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        raise _no_room(path.parent, error) from error
    with room as folder:
        made = Path(folder) / path.name
        try:
            subprocess.run(
                [*command, str(_SOURCE), "-o", str(made)], check=True, capture_output=True, text=True
            )
        except OSError as error:
            raise BadOption(
                f"the C compiler '{command[0]}' cannot be run: {error.strerror}; set CC, {_REMEDY}"
            ) from error
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
            raise BadOption(
                f"the C compiler '{command[0]}' fails: {lines[0]}; set CC to another one, {_REMEDY}"
            ) from error
        made.replace(path)


def _no_room(folder: Path, error: OSError) -> BadOption:
    return BadOption(
        f"no kernels can be kept in {folder}: {error.strerror}; "
        f"set TUTTI_CACHE to one of your folders, {_REMEDY}"
    )


def _processor() -> str:
    """Return the instructions of this processor: hosts with different ones share home folders."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
