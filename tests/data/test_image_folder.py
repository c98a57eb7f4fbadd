"""Folders of pictures, with a folder for each class."""

from __future__ import annotations

import errno
import os

import pytest

from tutti.data.sources import read_source
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
    # A picture that is changed is decoded anew.
    Image.new("L", (4, 3), 50).save(folder / "dog" / "c.png", compress_level=0)
    assert read_source(folder, {}).parts["train"][0][2, 0, 0, 0] == 50


def test_grey_pictures_of_16_bits_keep_the_upper_8_and_floats_are_refused(folder):
    for name, value in (("cat/a.png", 65535), ("cat/more/b.png", 513), ("dog/c.png", 20000)):
        Image.new("I;16", (4, 3), value).save(folder / name)
    assert read_source(folder, {}).parts["train"][0][:, 0, 0, 0].tolist() == [255, 2, 78]
    Image.new("F", (4, 3), 0.5).save(folder / "dog" / "d.tif")
    with pytest.raises(BadData, match="its pixels are floats"):
        read_source(folder, {})


@pytest.mark.parametrize("kind", ["*.npy", "*-good.npy"])
def test_pictures_whose_decoded_files_are_cut_off_are_decoded_anew(folder, tmp_path, kind):
    whole = read_source(folder, {}).parts["train"][0].tolist()
    for path in (tmp_path / "cache" / "pictures").glob(kind):
        path.write_bytes(path.read_bytes()[:-20])
    assert read_source(folder, {}).parts["train"][0].tolist() == whole


def test_a_full_disk_is_seen_before_pictures_are_decoded_into_mapped_memory(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BadData, match="No space left on device; set TUTTI_CACHE to a folder that has room"):
        read_source(folder, {})


def test_folders_of_parts_have_folders_of_classes(folder):
    for part in ("train", "test"):
        (folder.parent / "all" / part).mkdir(parents=True)
        for kind in ("cat", "dog"):
            (folder.parent / "all" / part / kind).symlink_to(folder / kind)
    contents = read_source(folder.parent / "all", {})
    assert list(contents.parts) == ["train", "test"]
    assert contents.parts["test"][1].tolist() == [0, 0, 1]


def test_a_picture_that_cannot_be_read_is_named_or_left_out(folder, capsys):
    whole = (folder / "cat" / "a.png").read_bytes()
    (folder / "cat" / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadData, match=r"picture cat/a\.png of .*pets cannot be read: .*--data.skip-bad true"):
        read_source(folder, {})
    inputs, targets = read_source(folder, {"skip_bad": True}).parts["train"]
    assert (inputs[:, 0, 0, 0].tolist(), targets.tolist()) == ([2, 3], [0, 1])
    assert "1 of 3 pictures" in capsys.readouterr().err


def test_a_picture_that_would_start_a_program_is_not_opened(folder, monkeypatch):
    from PIL import EpsImagePlugin

    def start(*_, **__):
        raise AssertionError("Ghostscript has been started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", start)
    (folder / "cat" / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 3\n%%EndComments\n")
    with pytest.raises(BadData, match="none of the formats that are read"):
        read_source(folder, {})


def test_a_single_class_is_refused(folder):
    with pytest.raises(BadData, match="pictures of a single class"):
        read_source(folder / "cat", {})
