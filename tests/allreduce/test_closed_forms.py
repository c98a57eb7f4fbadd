"""Closed forms against runs on virtual ranks, message by message."""

from __future__ import annotations

import pytest
import torch

from tutti.allreduce import ALGORITHMS
from tutti.allreduce.adasum import Adasum
from tutti.allreduce.base import GradientLayout, Layer
from tutti.allreduce.closed_forms import CLOSED_FORMS
from tutti.allreduce.ranks import Ranks
from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import VirtualWorld

NETWORK = Network(1e-4, 1e9, 1e-6, 8e9, overhead_s=1e-5, adding_s_per_byte=2e-10)


def run(comm: Communicator, name: str, length: int) -> None:
    vector = torch.ones(length)
    if name in ALGORITHMS:
        ALGORITHMS[name](Ranks(comm), vector)
    else:
        layout = GradientLayout(length, torch.float32, (Layer(slice(0, length), (length,)),))
        Adasum(comm, layout).all_reduce(vector, 1.0)


@pytest.mark.parametrize("length", [100, 24_000])
@pytest.mark.parametrize("hosts", [(1,) * 8, (1,) * 6, (1,) * 12, (8,), (1,)], ids=str)
@pytest.mark.parametrize("name", [*ALGORITHMS, "adasum"])
def test_a_closed_form_is_the_time_of_its_algorithm(name: str, hosts: tuple[int, ...], length: int) -> None:
    world = VirtualWorld(sum(hosts), hosts, NETWORK)
    world.run(run, name, length)
    assert CLOSED_FORMS[name](NETWORK, hosts, 4 * length) == pytest.approx(world.seconds, rel=0.05, abs=1e-12)


@pytest.mark.parametrize(
    "topology", ["fat-tree:2:2", "shared:2", "ring", "torus:2x4", "sites:2:100mbit:20ms"]
)
def test_a_ring_of_ranks_fits_every_topology(topology: str) -> None:
    network, hosts = Network.parse(f"1gbit,50us,{topology}"), (1,) * 8
    world = VirtualWorld(8, hosts, network)
    world.run(run, "ring", 24_000)
    assert CLOSED_FORMS["ring"](network, hosts, 96_000) == pytest.approx(world.seconds, rel=0.05)


def test_ranks_of_a_host_take_turns_on_its_link() -> None:
    world = VirtualWorld(8, 4, NETWORK)
    world.run(run, "halving_doubling", 24_000)
    found = CLOSED_FORMS["halving_doubling"](NETWORK, (4, 4), 96_000)
    assert found == pytest.approx(world.seconds, rel=0.05)
