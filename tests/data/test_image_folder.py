"""Folders of pictures, with a folder for each class."""

from __future__ import annotations

import errno
import os

import pytest

from tutti.data.sources import read_inputs, read_source
from tutti.errors import BadData

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data'")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Pictures of cats and dogs, whose brightness numbers them."""
    for name, value in (("cat/a.png", 1), ("cat/more/b.png", 2), ("dog/c.png", 3), ("dog/.hidden.png", 9)):
        path = tmp_path / "pets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 3), value).save(path)
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("sleeps")
    return tmp_path / "pets"


def test_each_folder_is_a_class(folder):
    contents = read_source(folder, {})
    inputs, targets = contents.parts["train"]
    assert (contents.name, contents.labels) == ("pets", ("cat", "dog"))
    assert (inputs.shape, inputs[:, 0, 0, 0].tolist()) == ((3, 1, 3, 4), [1, 2, 3])
    assert targets.tolist() == [0, 0, 1]
    # A picture that has changed is decoded again.
    Image.new("L", (4, 3), 50).save(folder / "dog" / "c.png", compress_level=0)
    assert read_source(folder, {}).parts["train"][0][2, 0, 0, 0] == 50
    with pytest.raises(BadData, match="pictures of a single class"):
        read_source(folder / "cat", {})
    unlabelled, _ = read_inputs(folder / "cat", {}).parts["train"]
    assert unlabelled[:, 0, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_pictures_of_more_than_8_bits_are_refused(folder, mode):
    Image.new(mode, (4, 3), 1).save(folder / "dog" / "d.tif")
    with pytest.raises(BadData, match=r"1 of 4 pictures .*\(dog/d\.tif: its pixels have more than 8 bits"):
        read_source(folder, {})


def test_pictures_whose_decoded_file_is_cut_off_are_decoded_again(folder, tmp_path):
    whole = read_source(folder, {}).parts["train"][0].tolist()
    (path,) = (tmp_path / "cache" / "pictures").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert read_source(folder, {}).parts["train"][0].tolist() == whole


def test_a_full_disk_is_seen_before_pictures_are_decoded_into_mapped_memory(folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BadData, match="No space left on device; set TUTTI_CACHE to a folder that has room"):
        read_source(folder, {})
    assert not [*(tmp_path / "cache" / "pictures").iterdir()]


def test_folders_of_parts_have_folders_of_classes(folder):
    for part in ("train", "test"):
        (folder.parent / "all" / part).mkdir(parents=True)
        for kind in ("cat", "dog"):
            (folder.parent / "all" / part / kind).symlink_to(folder / kind)
    contents = read_source(folder.parent / "all", {})
    assert list(contents.parts) == ["train", "test"]
    assert contents.parts["test"][1].tolist() == [0, 0, 1]


def test_a_picture_that_would_start_a_program_is_not_opened(folder, monkeypatch):
    from PIL import EpsImagePlugin

    def start(*_, **__):
        raise AssertionError("Ghostscript has been started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", start)
    (folder / "cat" / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 3\n%%EndComments\n")
    with pytest.raises(BadData, match=r"1 of 3 .* cannot be read \(cat/a\.png: cannot identify image file\)"):
        read_source(folder, {})
