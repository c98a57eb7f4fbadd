"""The loop with workers that have batches of their own, side by side or from a queue."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR

from tests.trainers import trainer_of
from tests.training.blobs import Apart, blobs, model
from tutti.comm.base import Communicator, cut
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, Part, Queue
from tutti.replica import Replica
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.precision import Arithmetic
from tutti.training.trainer import Trainer

TRAIN, VALIDATION = blobs(205), blobs(61, seed=4)
BATCH, SEED = 20, 5
FP64 = Arithmetic("fp64")


def trainer(comm: Communicator, passes: int = 1, queue: bool = False, **rest) -> Trainer:
    module = FP64.prepare(model())
    train = rest.pop("train", TRAIN)
    replica = Replica(module)
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    batches = Batches(train, BATCH, comm.rank, comm.size, passes, SEED, own=True)
    if "decay" in rest:
        rest["scheduler"] = LinearLR(optimizer, 1.0, 0.5, total_iters=rest.pop("decay"))
    return trainer_of(
        comm=comm,
        replica=replica,
        worker=Apart(replica, comm, optimizer),
        optimizer=optimizer,
        batches=Queue(batches, comm.counter().add) if queue else batches,
        loss=LOSSES["cross_entropy"],
        metrics=[METRICS["accuracy"]],
        arithmetic=FP64,
        **{**({} if "steps" in rest else {"epochs": 2}), **rest},
    )


def own_batches(part: Part, rank: int, size: int, epochs: int) -> list[Tensor]:
    """The samples of each of a rank's updates, straight from the definition."""
    orders = [Batches(part, BATCH, seed=SEED).order(epoch) for epoch in range(epochs)]
    rounds = [turn for order in orders for turn in order.split(BATCH * size)]
    return [turn[cut(len(turn), size)[rank]] for turn in rounds]


def alone(batches: list[Tensor], part: Part = TRAIN) -> tuple[nn.Module, list[Tensor]]:
    """Plain training on some batches."""
    module = FP64.prepare(model())
    optimizer, trajectory = SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for indices in batches:
        if len(indices):
            inputs, targets = part.take(indices)
            optimizer.zero_grad()
            functional.cross_entropy(module(inputs.double()), targets).backward()
            optimizer.step()
            trajectory.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    return module, trajectory


def test_the_weights_are_written_when_they_are_final_and_before_the_last_record() -> None:
    def program(comm: Communicator) -> Tensor:
        epochs: list[int] = []
        written: list[tuple[int, Tensor]] = []

        def write() -> None:
            written.append((len(epochs), trains.replica.flats[0].weights.clone()))

        trains = trainer(comm, on_epoch=lambda record: epochs.append(record.epoch), checkpoint=write)
        trains.fit()
        ((before, weights),) = written
        assert (before, epochs) == (1, [1, 2])
        assert torch.equal(weights, trains.replica.flats[0].weights)
        return weights

    first, second = VirtualWorld(2).run(program)
    assert torch.equal(first, second)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_worker_makes_its_own_updates_from_its_own_batches(ranks: int, passes: int) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        trains = trainer(comm, passes)
        trains.fit()
        own = trains.worker.trajectory[-1]
        return own[own != 0], nn.utils.parameters_to_vector(trains.replica.module.parameters()).detach()

    found = VirtualWorld(ranks).run(program)
    expected = [alone(own_batches(TRAIN, rank, ranks, 2))[1][-1] for rank in range(ranks)]
    for (own, _), wanted in zip(found, expected, strict=True):
        assert (own - wanted).norm() < 1e-12 * wanted.norm()
    mean = torch.stack(expected).mean(0)
    for _, final in found:
        assert (final - mean).norm() < 1e-12 * mean.norm()


def test_settled_weights_are_evaluated_and_training_goes_on_from_the_worker_s_own() -> None:
    def program(comm: Communicator) -> tuple[list[str], list[Tensor], float]:
        trains = trainer(comm, epochs=3, validation=VALIDATION)
        history = trains.fit()
        return trains.worker.calls, trains.worker.trajectory, history[0].validation.loss

    def without(comm: Communicator) -> list[Tensor]:
        trains = trainer(comm, epochs=3)
        trains.fit()
        return trains.worker.trajectory

    rounds = ["step"] * 6
    (calls, trajectory, loss), (_, _, other) = VirtualWorld(2).run(program)
    assert calls == [*rounds, "settle", "resume", *rounds, "settle", "resume", *rounds]
    assert all(map(torch.equal, trajectory, VirtualWorld(2).run(without)[0]))
    assert loss == other
    module, _ = alone(own_batches(TRAIN, 0, 2, 1))
    ends = [alone(own_batches(TRAIN, rank, 2, 1))[1][-1] for rank in range(2)]
    nn.utils.vector_to_parameters(torch.stack(ends).mean(0), module.parameters())
    with torch.no_grad():
        expected = functional.cross_entropy(module(VALIDATION.inputs.double()), VALIDATION.targets)
    assert loss == pytest.approx(expected.item(), rel=1e-12)


def test_records_tell_what_each_rank_did() -> None:
    def program(comm: Communicator) -> list[object]:
        return trainer(comm, epochs=1, seconds_per_sample=1 + comm.rank).fit()[0].ranks

    first, second = VirtualWorld(2).run(program)
    assert first == second
    assert [rank.samples for rank in first] == [103, 102]
    assert [rank.stages["forward"] + rank.stages["backward"] for rank in first] == pytest.approx(
        [103.0, 204.0]
    )
    # Six times half a second in steps; at the end of the epoch the fast one waits for the slow one.
    assert [rank.wait_s for rank in first] == pytest.approx([104.0, 3.0], abs=1e-3)
    for rank in first:
        assert (rank.updates, rank.exchanges, rank.bytes_sent) == (6, 6, 48)
        assert (rank.staleness_mean, rank.staleness_max, rank.age_s_p99) == (1.0, 2, 0.25)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_queue_trains_on_every_sample_once_in_each_epoch(ranks: int) -> None:
    def program(comm: Communicator) -> list[tuple[int, int, bool]]:
        history = trainer(comm, queue=True, epochs=3, decay=12).fit()
        return [(record.train.samples, record.step, record.complete) for record in history]

    rounds = -(-205 // (BATCH * ranks))
    expected = [(205, rounds * epoch, True) for epoch in (1, 2, 3)]
    assert VirtualWorld(ranks).run(program) == [expected] * ranks
