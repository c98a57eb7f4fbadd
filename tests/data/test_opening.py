"""A data set lies in memory once per host, and an error of one host reaches every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_data, open_pool
from tutti.data.scale import uneven
from tutti.errors import BadData, BadOption, TuttiError


def test_ranks_of_one_host_see_the_same_memory(images):
    world = VirtualWorld(ranks=5, ranks_per_host=3)
    sets = world.run(lambda comm: open_data(images, comm))
    places = [found.train.stored_inputs.data_ptr() for found in sets]
    assert len(set(places[:3])) == 1
    assert len(set(places[3:])) == 1
    assert places[0] != places[3]
    for found in sets[1:]:
        assert torch.equal(found.train.inputs, sets[0].train.inputs)
        assert torch.equal(found.validation.targets, sets[0].validation.targets)
        assert found.train.scale == sets[0].train.scale


def test_only_the_first_rank_of_a_host_looks_at_the_data(images):
    def open_mine(comm):
        return open_data(images if comm.node.rank == 0 else object(), comm)

    sets = VirtualWorld(ranks=4, ranks_per_host=2).run(open_mine)
    assert [len(found.train) for found in sets] == [54] * 4


def test_an_error_of_one_host_is_raised_on_every_rank(images):
    def errors(comm):
        with pytest.raises(TuttiError) as caught:
            open_data("/no/such.npz" if comm.rank >= 2 else images, comm)
        return type(caught.value), str(caught.value)

    found = VirtualWorld(ranks=4, ranks_per_host=2).run(errors)
    assert len(set(found)) == 1
    assert found[0][0] is BadData
    assert "there is no /no/such.npz" in found[0][1]


def test_hosts_with_different_data_are_refused(images):
    x, y = images

    def errors(comm):
        with pytest.raises(BadData) as caught:
            open_data((x, y) if comm.rank < 2 else (x, np.roll(y, 1)), comm)
        return str(caught.value)

    found = set(VirtualWorld(ranks=4, ranks_per_host=2).run(errors))
    assert len(found) == 1
    assert "the hosts read different data: rank" in found.pop()


def test_the_scale_is_that_of_the_training_part_alone(opened, images):
    x, y = images
    plain = opened(((x[:40], y[:40]), (x[40:], y[40:])), validation=0)
    assert plain.train.scale.mean == pytest.approx(((x[:40] / 255.0).mean(),))
    assert plain.train.scale.std == pytest.approx(((x[:40] / 255.0).std(),))
    assert plain.test.scale == plain.train.scale


def test_validation_depends_on_the_seed_alone(opened, images):
    first, again, other = (opened(images, seed=seed).validation.inputs for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_parts_of_groups_are_the_same_on_any_ranks_and_the_scale_is_that_of_the_training_part(
    images, tmp_path
):
    x, y = images
    persons = np.array([f"p{number % 12}" for number in range(60)])
    np.savez(tmp_path / "set.npz", x=x, y=y, person=persons)

    def rows(comm):
        pool = open_pool(str(tmp_path / "set.npz"), comm, {"group": "person"})
        found = pool.divided(comm, 0.25, 3, test=0.25)
        return [part.rows.tolist() for part in found.parts], found.test.scale.mean

    (parts, mean), *others = [one for ranks in (1, 3) for one in VirtualWorld(ranks, 2).run(rows)]
    assert all(other == (parts, mean) for other in others)
    train, validation, test = parts
    assert sorted(train + validation + test) == list(range(60))
    assert (len(validation), len(test)) == (10, 15)
    assert sum(len(np.unique(persons[part])) for part in parts) == 12
    assert mean == pytest.approx(((x[train] / 255.0).mean(),))


def test_a_share_beside_a_test_part_is_refused(images):
    with pytest.raises(BadOption, match=r"--test is 0\.2, but arrays has a test part"):
        VirtualWorld(1).run(lambda comm: open_pool((images, images), comm).divided(comm, 0.1, 0, test=0.2))


def test_bytes_stay_bytes_and_floats_are_not_scaled(opened, images):
    x, y = images
    assert opened((x, y)).train.inputs.dtype == torch.uint8
    found = opened((x.astype(np.float64), y), validation=0)
    assert found.train.inputs.dtype == torch.float32
    assert torch.equal(found.train.take(torch.arange(60))[0], torch.from_numpy(x).float())


def test_large_arrays_are_filled_piece_by_piece(opened, monkeypatch, images):
    monkeypatch.setattr("tutti.data.arrays.CHUNK", 200)
    whole = opened(images, validation=0)
    assert torch.equal(whole.train.inputs[:, 0], torch.from_numpy(images[0]))


@pytest.mark.parametrize(
    ("factors", "advised"), [((1, 1e4), True), ((1, 50), False), ((0, 3), False), ((1e-3, 1, 1), True)]
)
def test_columns_of_very_different_size_are_noticed(opened, factors, advised):
    x = np.random.default_rng(0).normal(size=(50, len(factors))) * factors
    data = opened((x, np.arange(50) % 2))
    assert (uneven(data.train) is not None) is advised
    flags = opened(((x > 1).astype(np.float32), np.arange(50) % 2))
    assert uneven(flags.train) is None
