"""A communicator that is traced does what it does, and what it did can be drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contracts.communicator import CHECKS
from tests.contracts.strategy import NAMES, brisk, needs_centre, on_several_hosts
from tests.contracts.training import Run, train
from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.traced import TracedCommunicator, compare_clocks
from tutti.comm.virtual.world import VirtualWorld
from tutti.records.trace import ClockReading, Lane, Trace, chrome_trace
from tutti.strategies import STRATEGIES

SLOW = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, local_latency_s=1e-4)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", [VirtualWorld(3), VirtualWorld(5, [2, 3])], ids=["3", "2+3"])
def test_contract(world: VirtualWorld, check: Callable[[Communicator], None]) -> None:
    world.run(lambda comm: check(TracedCommunicator(comm, Trace())))


def picture(world: VirtualWorld, program: Callable[[Communicator, Trace], None]) -> dict[str, Any]:
    """What all ranks of a world, servers included, did in a program."""
    lanes: list[Lane] = []

    def run(comm: Communicator) -> None:
        trace = Trace()
        server = comm.servers is not None and comm.servers.serving
        program(TracedCommunicator(comm, trace), trace)
        lanes.append(Lane(f"{'server' if server else 'rank'} {comm.rank}", 0, "virtual", trace))

    world.run(run)
    return chrome_trace(sorted(lanes, key=lambda lane: lane.name))


def check_picture(found: dict[str, Any]) -> Counter[str]:
    """It is valid; returns how many spans of each name there are."""
    lanes: dict[int, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            lanes.setdefault(event["tid"], []).append(event)
    for spans in lanes.values():
        assert [span["ts"] for span in spans] == sorted(span["ts"] for span in spans)
        _check_nesting(spans)
    return Counter(span["name"] for spans in lanes.values() for span in spans)


def _check_nesting(spans: list[dict[str, Any]]) -> None:
    """Of two spans of a lane one contains the other, or one is over before the other begins."""
    open_: list[float] = []
    for span in spans:
        began, ended = (round(1e3 * at) for at in (span["ts"], span["ts"] + span["dur"]))
        while open_ and open_[-1] <= began:
            open_.pop()
        assert not open_ or ended <= open_[-1], span
        if ended > began:
            open_.append(ended)


def test_operations_are_spans() -> None:
    def program(comm: Communicator, trace: Trace) -> None:
        vector, lock = torch.zeros(4), comm.lock()
        comm.compute(1.0 + comm.rank)
        comm.barrier()
        following, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        if comm.rank == 0:
            comm.send(vector, 1)
        elif comm.rank == 1:
            comm.recv(vector)
        comm.exchange(vector, following, torch.zeros(4), before)
        comm.broadcast(vector, 2)
        with lock:
            comm.compute(0.5)

    found = picture(VirtualWorld(3, network=SLOW), program)
    counts = check_picture(found)
    operations = {"barrier": 3, "broadcast": 3, "recv": 1, "locked": 3}
    assert operations.items() <= counts.items()
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    waits = [span["dur"] for span in spans if span["name"] == "wait for lock"]
    assert sorted(waits)[-1] == pytest.approx(1e6, rel=1e-2)
    barriers = {span["tid"]: span["dur"] for span in spans if span["name"] == "barrier"}
    assert barriers[0] - barriers[2] == pytest.approx(2e6)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_any_strategy_can_be_drawn(name: str, hosts: int) -> None:
    strategy = brisk(STRATEGIES[name])
    if hosts > 1 and not on_several_hosts(strategy):
        pytest.skip(f"'{name}' runs on one host")
    ranks = 1 if strategy.most_workers == 1 else 2 * hosts
    servers = 1 if hosts > 1 and needs_centre(strategy) else 0
    world = VirtualWorld(ranks, ranks // hosts, SLOW, servers=servers)

    def program(comm: Communicator, trace: Trace) -> None:
        train(comm, Run(strategy, epochs=1, batch_size=16, trace=trace))

    found = picture(world, program)
    spans = check_picture(found)
    names = {event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"}
    assert len(names) == ranks + servers
    assert bool(servers) <= (spans["recv"] > 0)
    assert {"epoch 1", "forward", "backward"} <= spans.keys()


def test_clocks_that_are_apart_and_drift_are_found_to_be_so() -> None:
    """Those of the second host are 5 s ahead and a thousandth too fast."""
    network = Network(latency_s=20e-6)

    def program(comm: Communicator) -> tuple[Lane, float, float]:
        other = comm.node.broadcast_object(comm.rank) != 0

        def clock() -> float:
            return comm.clock() * 1.001 + 5.0 if other else comm.clock()

        readings = []
        for _ in range(2):
            reading = compare_clocks(comm, clock)
            assert reading is not None
            readings.append(reading)
            comm.compute(10.0)
        comm.barrier()
        return Lane("", 0, "", Trace(), tuple(readings)), clock(), comm.clock()

    for lane, told, truth in VirtualWorld(4, 2, network).run(program):
        assert lane.nanoseconds(told) / 1e9 == pytest.approx(truth, abs=50e-6)
        assert all(reading.residual_s < 50e-6 for reading in lane.readings)


def test_one_host_has_one_clock() -> None:
    found: list[ClockReading | None] = VirtualWorld(3).run(lambda comm: compare_clocks(comm, comm.clock))
    assert found == [None] * 3
