"""IDX and NPZ files are read, and what is wrong with one is said in numbers."""

from __future__ import annotations

import os
import struct
import zipfile

import numpy as np
import pytest

from tutti.data.formats.idx import read_idx
from tutti.errors import BadData
from tutti.records.npz import read_npz


@pytest.mark.parametrize("name", ["a-idx", "a-idx.gz"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
def test_idx_files_of_every_type_are_read(tmp_path, write_idx, name, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found = read_idx(write_idx(tmp_path / name, array))
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_the_first_bytes_tell_whether_a_file_is_packed(tmp_path, write_idx):
    array = np.arange(6, dtype=np.uint8)
    plain = write_idx(tmp_path / "plain", array)
    misnamed = tmp_path / "misnamed.gz"
    misnamed.write_bytes(plain.read_bytes())
    assert np.array_equal(read_idx(misnamed), array)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("a", lambda content: content[:-5], "truncated or damaged .* asks for 200 bytes, and it has 195"),
        ("a", lambda content: content + b"x", "it has 201 or more"),
        ("a", lambda content: content[:6], "truncated"),
        ("a", lambda content: b"\x89PNG\r\n", "an IDX file begins with the bytes 00 00"),
        ("a.gz", lambda content: content[:-20], "truncated or damaged"),
        ("a.gz", lambda content: content[:-6] + b"\xff" + content[-5:], r"a\.gz is truncated or damaged"),
    ],
)
def test_a_broken_idx_file_is_named(tmp_path, write_idx, name, change, said):
    path = write_idx(tmp_path / name, np.arange(200, dtype=np.uint8))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadData, match=said):
        read_idx(path)


@pytest.mark.parametrize(
    ("array", "change", "said"),
    [
        (np.arange(600), lambda content: content[:1000], r"truncated or damaged \(1,000 bytes\)"),
        (np.array([{}, []], dtype=object), lambda content: content, "holds Python objects"),
        (np.arange(2), lambda _: b"text of somebody", r"truncated or damaged \(16 bytes\)"),
    ],
)
def test_a_broken_npz_file_is_refused_and_nothing_is_unpickled(tmp_path, array, change, said):
    path = tmp_path / "a.npz"
    np.savez(path, x=array)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadData, match=said):
        read_npz(path)


def npz_with(path, header, content=b""):
    """An archive with one array whose header is given."""
    text = header.encode() + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content)
    return path


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (422212465065984,)}",  # 3 PiB
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}",
        "(" * 5000,
        "{'descr': '<f8'}",
        "1" * 9000,
        "",
    ],
)
def test_an_array_whose_header_is_false_is_refused(tmp_path, header):
    with pytest.raises(BadData, match="damaged"):
        read_npz(npz_with(tmp_path / "a.npz", header))


@pytest.mark.parametrize("read", [read_idx, read_npz])
def test_pipes_and_devices_are_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(BadData, match="pipe, a socket or a device"):
            read(tmp_path / name)
