"""HDF5 files, alone and in lists: every sample once, whatever the files' sizes and the number of ranks."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, open_data
from tutti.data.sources import read_source
from tutti.errors import BadData, BadOption

h5py = pytest.importorskip("h5py", reason="needs the extra 'data'")

SIZES = (5, 1, 17, 2, 30, 8, 11)
OPTIONS = {"features": "events/jets", "labels": "events/kind"}


@pytest.fixture
def listed(tmp_path):
    """A list of seven files, whose samples are numbered through."""
    start = 0
    for number, size in enumerate(SIZES):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            rows = np.arange(start, start + size, dtype=np.float32)
            file["events/jets"] = np.stack([rows, -rows], axis=1)
            file["events/kind"] = np.arange(start, start + size) % 2
        start += size
    path = tmp_path / "files.txt"
    path.write_text("".join(f"{number}.h5\n" for number in range(len(SIZES))))
    return path


def epochs(listed, ranks):
    """The samples of the updates of two epochs: of each update those of all ranks together, in order."""

    def work(comm):
        data = open_data(str(listed), comm, validation=0, options=OPTIONS)
        batches = Batches(data.train, 8, comm.rank, comm.size, seed=3)
        return [
            [[int(x) for batch in passes for x in batch.inputs[:, 0]] for _, passes in batches.epoch(epoch)]
            for epoch in range(2)
        ]

    found = VirtualWorld(ranks=ranks).run(work)
    return [[list(chain(*parts)) for parts in zip(*one, strict=True)] for one in zip(*found, strict=True)]


def test_every_sample_of_seven_files_comes_once_in_an_order_that_no_number_of_ranks_changes(listed):
    alone = epochs(listed, 1)
    for epoch in alone:
        assert sorted(chain(*epoch)) == list(range(sum(SIZES)))
    assert alone[0] != alone[1]
    assert epochs(listed, 2) == alone
    assert epochs(listed, 3) == alone


def test_a_missing_or_truncated_file_of_a_list_is_named(listed):
    broken = listed.parent / "4.h5"
    broken.write_bytes(broken.read_bytes()[:1000])
    with pytest.raises(BadData, match=r"4\.h5 is truncated or damaged"):
        read_source(str(listed), OPTIONS)
    broken.unlink()
    with pytest.raises(BadData, match=r"there is no .*4\.h5"):
        read_source(str(listed), OPTIONS)


def test_files_of_another_shape_type_or_length_are_named(listed):
    for jets, kind, said in (
        (np.zeros((3, 4), np.float32), np.zeros(3, int), r"3\.h5 has other train inputs .* shape \(4,\)"),
        (np.zeros((3, 2), np.float64), np.zeros(3, int), r"3\.h5 has .* type float64"),
    ):
        with h5py.File(listed.parent / "3.h5", "w") as file:
            file["events/jets"], file["events/kind"] = jets, kind
        with pytest.raises(BadData, match=said):
            read_source(str(listed), OPTIONS)


def test_a_pattern_and_a_list_of_paths_are_the_files_in_natural_order(listed):
    (listed.parent / "5.h5").rename(listed.parent / "10.h5")
    numbers = [0, 1, 2, 3, 4, 6, 10]
    wanted = np.concatenate(
        [np.asarray(h5py.File(listed.parent / f"{n}.h5")["events/jets"]) for n in numbers]
    )
    for data in (str(listed.parent / "*.h5"), [listed.parent / f"{n}.h5" for n in numbers]):
        inputs, _ = read_source(data, OPTIONS).parts["train"]
        assert np.array_equal(np.asarray(inputs[:]), wanted)


def test_names_are_a_list_or_a_text_with_commas_and_targets_keep_theirs(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, name in enumerate(("met", "phi", "top", "higgs")):
            file[name] = np.arange(8) // 2**number % 2
    for features, labels in ((["met", "phi"], ["top", "higgs"]), ("met,phi", "top, higgs")):
        found = read_source(str(tmp_path / "a.h5"), {"features": features, "labels": labels})
        inputs, targets = found.parts["train"]
        assert (inputs.shape, targets.shape, found.labels) == ((8, 2), (8, 2), ("top", "higgs"))


def test_keys_that_lack_inputs_or_targets_name_the_options_and_every_data_set(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["jets"], file["labels"] = np.zeros((4, 3)), np.arange(4) % 2
    with pytest.raises(BadData, match=r"--data\.features NAME .*; it has jets \(4, 3\), labels \(4,\)"):
        read_source(str(tmp_path / "a.h5"), {})


def test_a_name_that_is_not_there_lists_those_that_are(listed):
    with pytest.raises(BadData, match=r"no data set 'jet'; it has events/jets \(5, 2\), events/kind \(5,\)"):
        read_source(str(listed.parent / "0.h5"), {"features": "jet", "labels": "events/kind"})
    with pytest.raises(BadData, match=r"--data.features NAME --data.labels NAME; it has events/jets"):
        read_source(str(listed.parent / "0.h5"), {})
    with pytest.raises(BadData, match=r"--data\.features NAME --data\.labels NAME; it has"):
        read_source(str(listed.parent / "0.h5"), {"features": "events/jets"})
    with pytest.raises(BadData, match="'jetz'"):
        read_source(str(listed.parent / "0.h5"), {"features": "jetz"})
    with pytest.raises(BadOption, match="'events/jets' is input and target at once"):
        read_source(str(listed.parent / "0.h5"), {"features": "events/jets", "labels": "events/jets"})


def test_usual_names_need_no_options_and_texts_are_classes(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "x_train", data=np.arange(48).reshape(4, 2, 2, 3).astype("u1"), compression="gzip"
        )
        file["y_train"] = ["b", "a", "b", "c"]
        file["x_test"], file["y_test"] = np.zeros((1, 2, 2, 3), "u1"), ["a"]
    contents = read_source(str(tmp_path / "a.h5"), {})
    inputs, targets = contents.parts["train"]
    assert (contents.labels, targets.tolist()) == (("a", "b", "c"), [1, 0, 1, 2])
    assert inputs.shape == (4, 3, 2, 2)
    assert np.array_equal(
        inputs[np.array([0, 3])], np.arange(48).reshape(4, 2, 2, 3)[[0, 3]].transpose(0, 3, 1, 2)
    )
    assert list(contents.parts) == ["train", "test"]


def test_several_features_are_the_columns_of_a_table(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["pt"], file["eta"], file["mass"] = [1.0, 2.0], [3.0, 4.0], [0.5, 0.25]
    options = {"features": ["eta", "pt"], "labels": "mass"}
    inputs, targets = read_source(str(tmp_path / "a.h5"), options).parts["train"]
    assert (inputs[:].tolist(), targets.tolist()) == ([[3, 1], [4, 2]], [0.5, 0.25])


def test_features_of_several_shapes_are_inputs_by_name_and_lists_of_numbers_are_sequences(tmp_path, opened):
    tokens, start = [[7], [1, 2, 3], [], [5, 5], [9]], 0
    for number, size in enumerate((3, 2)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            rows = np.arange(start, start + size, dtype=np.float32)
            file["events/image"], file["events/mass"] = np.tile(rows[:, None, None], (1, 2, 4)), rows
            file.create_dataset("events/tokens", (size,), h5py.vlen_dtype(np.int32))
            for row in range(size):
                file["events/tokens"][row] = tokens[start + row]
            file["y"] = rows
        start += size
    (tmp_path / "files.txt").write_text("0.h5\n1.h5\n")
    options = {"features": ["events/image", "events/mass", "events/tokens"], "labels": "y"}
    part = opened(str(tmp_path / "files.txt"), validation=0, options=options).train
    assert part.shape == {"image": (2, 4), "mass": (1,), "tokens": (3,)}
    seen, targets = part.take(torch.tensor([4, 1, 2]))
    assert targets.tolist() == seen["mass"][:, 0].tolist() == seen["image"][:, 1, 3].tolist() == [4, 1, 2]
    assert (seen["tokens"].tolist(), seen["lengths"].tolist()) == ([[9, 0, 0], [1, 2, 3], [0] * 3], [1, 3, 0])


def test_rows_that_are_kept_aside_are_read_from_their_files(listed, opened):
    data = opened(str(listed), validation=0.3, options=OPTIONS)
    both = torch.cat([data.train.inputs[:, 0], data.validation.inputs[:, 0]])
    assert sorted(both.tolist()) == list(range(sum(SIZES)))
