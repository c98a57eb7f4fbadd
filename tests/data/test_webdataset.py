"""WebDataset tars, alone and by a pattern of names; and what is refused in them."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest

from tutti.data.sources import read_source
from tutti.errors import BadData

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))


def picture(value):
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (value,) * 3).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def pack(tmp_path):
    """Writes a tar of files, whose contents may be texts, and returns its path."""

    def write(files, name="a.tar"):
        with tarfile.open(tmp_path / name, "w") as archive:
            for member, content in files:
                if isinstance(member, str):
                    member = tarfile.TarInfo(member)
                content = content.encode() if isinstance(content, str) else content
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return str(tmp_path / name)

    return write


def read(path, **options):
    contents = read_source(path, options)
    inputs, targets = contents.parts["train"]
    return inputs[:], targets, contents


def test_pictures_with_class_names_of_several_archives(pack):
    for number in range(3):
        files = [
            (f"at/{number}.png", picture(number)),
            (f"at/{number}.cls", ["cat", "dog"][number % 2]),
            (f"at/{number}.json", json.dumps({"caption": "a text"})),
            (f"at/._{number}.png", "of a Mac"),
        ]
        path = pack(files, f"0{number}.tar")
    inputs, targets, contents = read(path.replace("02", "0*"))
    assert (inputs.shape, inputs.dtype) == ((3, 3, 3, 4), np.uint8)
    assert inputs[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert (targets.tolist(), contents.labels) == ([0, 1, 0], ("cat", "dog"))


def test_keys_of_json_are_columns(pack):
    path = pack([("a.json", '{"label": 0, "mass": 1.5}'), ("b.json", '{"label": 1, "mass": 2, "x": [3]}')])
    inputs, targets, contents = read(path, columns="label", target="mass")
    assert (inputs.tolist(), targets.tolist(), contents.columns) == ([[0], [1]], [1.5, 2], ("label",))
    with pytest.raises(BadData, match="no list in some rows of the column 'x'"):
        read(path, columns="x")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([("1.cls", "0"), ("1.cls", "0")], r"the file '1\.cls' twice"),
        ([("1.png", "none"), ("1.cls", "0")], r"1 of 1 pictures of .*a\.tar cannot be read \(1\.png: "),
        ([("1.cls", "0"), ("1.json", "{")], r"broken in its file '1\.json'"),
        ([("1.cls", "0"), ("1.jpg", ""), ("1.png", "")], "values of type binary .* where numbers are due"),
        ([], "has no files"),
    ],
)
def test_what_cannot_be_read_is_named(pack, files, said):
    with pytest.raises(BadData, match=said):
        read(pack(files))


def test_archives_that_are_truncated_are_refused(pack, tmp_path):
    path = tmp_path / "a.tar"
    pack([(f"{number}.{kind}", "1") for number in range(20) for kind in ("cls", "json")])
    content = path.read_bytes()
    for cut in (100, 700, 5120, 20480, 20 * 2 * 1024):
        path.write_bytes(content[:cut])
        with pytest.raises(BadData, match="truncated or damaged"):
            read(str(path))
    bomb = tarfile.TarInfo("1.npy")
    bomb.size = 1 << 40
    path.write_bytes(bomb.tobuf() + content)
    with pytest.raises(BadData, match="truncated or damaged"):
        read(str(path))
