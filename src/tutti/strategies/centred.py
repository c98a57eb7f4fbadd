"""The common part of all strategies with a parameter centre."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator, Servers
from tutti.optim.sharded import ShardedOptimizer, announce
from tutti.parameter_server.base import Centre, Receipt, Rule
from tutti.parameter_server.connect import join_centre
from tutti.parameter_server.server import Server
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Pace, Strategy, WeightPlacement
from tutti.strategies.own_weights import OwnWeightsWorker


@dataclass(frozen=True)
class Centred(Strategy):
    """A strategy whose workers have their own weights and meet at a parameter centre.

    On one host the centre lies in shared memory, and each worker applies the rule itself. Over several hosts
    it is kept by separate ranks, the servers.
    """

    home: ClassVar[WeightPlacement] = WeightPlacement.PRIVATE
    pace: ClassVar[Pace] = Pace.FREE
    joint_norm: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Centre,)

    @abstractmethod
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        """Make the rule by which the centre uses a worker's message."""

    @final
    def serve(self, servers: Servers, replica: Replica, optimizer: Optimizer, clip: Clip) -> None:
        """Serve this strategy's workers until all have finished; raise PeerLost if one of them is gone."""
        workers = servers.comm.size - len(servers.ranks)
        Server(servers, replica, self.rule(replica, optimizer, workers, clip)).run()


class CentredWorker(OwnWeightsWorker):
    """A worker with its own weights and a centre, whose weights are evaluated and kept."""

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        rule: Rule,
        optimizer: Optimizer,
        clip: Clip,
        steps: ShardedOptimizer | None = None,  # None: the centre makes the steps
        centre: Centre | None = None,  # None: one that the workers of this run keep
    ) -> None:
        super().__init__(replica, steps, clip)
        self.centre = centre or join_centre(comm, replica, rule)
        self._announced = optimizer

    @override
    def prepare(self) -> None:
        """Announce an update to the learning-rate schedulers, and clip this worker's own gradient."""
        announce(self._announced)
        super().prepare()

    def count(self, receipt: Receipt) -> None:
        """Count an exchange."""
        self.traffic.add(receipt.bytes_sent, receipt.wait_s, receipt.staleness, receipt.age_s)
        self.traffic.dropped += receipt.dropped
        self.updating.seconds += receipt.update_s

    @override
    def settle(self) -> None:
        self.centre.leave()
        super().settle()

    @override
    def agree(self) -> None:
        self.centre.read(self.weights)

    @override
    def resume(self) -> None:
        if self.settled:
            super().resume()
            self.centre.rejoin()

    @override
    def state(self) -> State:
        """Return, besides this worker's own, the state of the centre and of its optimizer."""
        state, centre = super().state(), self.centre.state()
        state.joint.add(centre.joint)
        state.alone.add(centre.alone)
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        self.centre.load_state(saved)

    @override
    def finish(self) -> None:
        if self.settled:
            super().resume()  # its own weights again; there is nothing to rejoin
        self.flush()
        self.centre.leave()
        super().finish()
        self.centre.close()

    def flush(self) -> None:
        """Bring what has not been brought yet; no step follows."""
        return
