"""A path names an NPZ file or a folder with IDX files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tutti.errors import BadData


def test_an_npz_file_gives_train_and_test_parts(tmp_path, opened, images):
    x, y = images
    np.savez(tmp_path / "set.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    found = opened(str(tmp_path / "set.npz"), validation=0.25)
    assert found.name == "set"
    assert (len(found.train), len(found.validation), len(found.test)) == (30, 10, 20)
    assert torch.equal(found.test.inputs[:, 0], torch.from_numpy(x[40:]))
    assert found.test.targets.tolist() == y[40:].tolist()


def test_npz_keys_have_synonyms(tmp_path, opened, images):
    x, y = images
    np.savez(
        tmp_path / "a.npz",
        train_images=x,
        train_labels=y,
        val_images=x[:9],
        val_labels=y[:9],
        notes=np.zeros(3),
    )
    found = opened(tmp_path / "a.npz", validation=0.5)
    assert (len(found.train), len(found.validation), found.test) == (60, 9, None)
    np.savez(tmp_path / "b.npz", X=x, y=y)
    assert len(opened(tmp_path / "b.npz", validation=0).train) == 60


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("bilder y_train", "lacks the train inputs; keys found: bilder, y_train; expected 'x_train'"),
        *(
            (f"x_train y_train {wrong}", f"'{wrong}'; did you mean 'x_test'. Its keys are x_train, y_train, ")
            for wrong in ("x_tets", "x_tset")
        ),
        ("x x_train y", r"the keys 'x' and 'x_train' of .* stand for the same"),
    ],
)
def test_npz_keys_that_are_not_understood_are_refused(tmp_path, opened, images, keys, said):
    np.savez(tmp_path / "a.npz", **{key: images[key.startswith("y")] for key in keys.split()})
    with pytest.raises(BadData, match=said):
        opened(str(tmp_path / "a.npz"))


def test_a_folder_gives_its_idx_files(tmp_path, opened, write_idx, images):
    x, y = images
    write_idx(tmp_path / "train-images.idx3-ubyte", x[:50])
    write_idx(tmp_path / "train-labels.idx1-ubyte", y[:50])
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", x[50:])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", y[50:])
    found = opened(tmp_path, validation=0)
    assert found.name == tmp_path.name
    assert (len(found.train), len(found.test)) == (50, 10)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train"], "lacks the train labels; it has: train-images-idx3-ubyte; expected"),
        (
            ["emnist-letters-train", "emnist-digits-train"],
            r"holds 2 data sets \(emnist-digits-, emnist-letters-\); put each",
        ),
    ],
)
def test_a_folder_of_idx_files_that_are_no_data_set_is_refused(
    tmp_path, opened, write_idx, images, names, said
):
    for name in names:
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", images[0])
    with pytest.raises(BadData, match=said):
        opened(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("trainin.npz", r"there is no .*trainin\.npz; did you mean .*training\.npz\?"),
        (
            "table.npz",
            r"there is no .*table\.npz; did you mean .*training\.npz\?",
        ),  # table.page is of another kind
        ("xyz/a.npz", r"there is no .*; .* has: folder, table\.page, training\.npz"),
        ("table.page", r"of no known kind: it begins with the bytes 61 2c 62 0a.*mine.py:read"),
        ("training.npz", r"is empty \(0 bytes\)"),
        ("folder", "holds no data set that is known: it has nothing"),
    ],
)
def test_a_path_without_data_is_named_with_what_is_there(tmp_path, opened, path, said):
    (tmp_path / "training.npz").touch()
    (tmp_path / "table.page").write_text("a,b\n1,2\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadData, match=said):
        opened(str(tmp_path / path))
