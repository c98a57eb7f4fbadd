"""The training loop: forward, backward, the strategy's step, and what is to be known about them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import cast

import torch
from torch import Tensor, nn

from tutti.optim.sharded import equal_slices
from tutti.optim.state import names_in_groups
from tutti.records.heartbeat import SAVING, VALIDATING, WAITING
from tutti.records.json_lines import parse_record, to_json
from tutti.records.run import EpochRecord, Evaluation, RankRecord, now
from tutti.records.texts import RunLength
from tutti.state import Held, Saved, State, TensorPiece, Values, name_of, pieces_of, whole_piece
from tutti.terminal import warn_on_stderr
from tutti.training.agenda import Agenda, Decision
from tutti.training.arrivals import Arrivals, compared
from tutti.training.best_weights import BestWeights
from tutti.training.dropout import drawn_by_sample
from tutti.training.evaluation import (
    Objective,
    Tally,
    average_buffers,
    load_buffers,
    mean_buffers,
    named_buffers,
    share_untrained,
)
from tutti.training.finite_check import refuse_broken_weights
from tutti.training.learning_rate import LearningRate
from tutti.training.module_state import ModuleState, PlainAttributes
from tutti.training.preflight import check_fit, check_smallest_batch
from tutti.training.progress import Moment
from tutti.training.random_state import load_random_state, random_state
from tutti.training.run_parts import Hooks, Schedule, Workers
from tutti.training.stopping import Ending
from tutti.training.timers import EXCHANGE, StageTimer, look_s
from tutti.training.update_gradient import UpdateGradient
from tutti.training.validation import VALIDATIONS, Validation, ValidationPlan, ValidationTask
from tutti.training.weights import names_in_state


@dataclass(frozen=True)
class OpenEpoch:
    """An epoch that is under way.

    Attributes:
        number: from 0.
        began: when it did, by the trainer's clock.
        tally: of the training samples.
    """

    number: int
    began: float
    tally: Tally


@dataclass(frozen=True)
class PlaceInEpoch:
    """The place of a rank in an epoch.

    Attributes:
        ended: whether it has made all its updates.
        round: the number of the epoch's round that it makes next.
        counts: of its tally.
        sums: likewise.
        steps: that it has made, as far as no record has them.
        left_out: its gradients that were not used, likewise.
        traffic: the counts of its exchanges, likewise.
        stages: its seconds by stage, likewise.
        wait_s: those of its exchanges that it waited.
    """

    ended: bool
    round: int
    counts: list[int]
    sums: list[float]
    steps: int
    left_out: int
    traffic: Values
    stages: dict[str, float]
    wait_s: float


@dataclass(frozen=True)
class Resumed:
    """The part of an epoch that was trained before the run was resumed: seconds, and a tally's state."""

    seconds: float
    tally: Values


class Trainer:
    """Trains a replica, on every rank of a communicator at once.

    Args:
        workers: the ranks, and how this one computes and steps.
        objective: loss and metrics, and how the model computes; the module was prepared by that.
        schedule: the batches, and how many updates are made with them.
        validation: what is evaluated after every epoch; None: nothing.
        hooks: see the run.
        agenda: when the state is saved, and whether the run stops early; None: never, and it does not.
        ending: when the figures of its epochs end the run, and which weights it leaves.

    Attributes:
        stopped: why the run has stopped before its end, to go on another time; None: it has not.
        ended: why it has come to its end before the last update; None: it has not.
        restored: the epoch whose weights are the final ones; None: the last.
        final: the final weights on the validation part; None: there is none, or the run has stopped.
    """

    def __init__(
        self,
        workers: Workers,
        objective: Objective,
        schedule: Schedule,
        validation: ValidationPlan | None = None,
        hooks: Hooks | None = None,
        agenda: Agenda | None = None,
        ending: Ending | None = None,
    ) -> None:
        self.comm, self.replica, self.worker = workers.comm, workers.replica, workers.worker
        self._optimizer, self._everyone = workers.optimizer, workers.everyone or workers.comm
        self._real_time = workers.seconds_per_sample is None
        self._objective = objective
        self._schedule = schedule
        self._batches, self._balance, self._updates = schedule.batches, schedule.balance, schedule.updates
        self._learning_rate = LearningRate(workers.optimizer, schedule.lr, schedule.stepped)
        self._validation_plan, self._hooks, self._agenda = validation, hooks or Hooks(), agenda
        self._progress = self._hooks.progress
        self._now = perf_counter if self._real_time else self.comm.clock
        self._stages, self._look_s = StageTimer(self._now), look_s(self._now)
        self.worker.updating.clock = self._now
        self._step, self._steps, self._lr = 0, 0, math.nan
        self._counted = 0
        self._meets, self._arrivals = workers.meets, Arrivals()
        self._gradient = UpdateGradient(workers, objective, schedule, self._stages)
        self._history: list[EpochRecord] = []
        self._unvalidated: deque[EpochRecord] = deque()
        self._validation: Validation | None = None
        self._resumed: Resumed | None = None
        self._ending = ending or Ending()
        self._best: BestWeights | None = None
        function = objective.loss.function
        # Of a loss that is a function there is nothing to remember.
        self._loss_module = function if isinstance(function, nn.Module) else nn.Module()
        modules = self.replica.module, self._loss_module
        self._module_states = tuple(map(ModuleState, modules))
        self._attributes: PlainAttributes | None = PlainAttributes(self.replica.module, workers.optimizer)
        if self._ending.restores_best:
            self._best = BestWeights(self.replica, self._module_states[0], self.comm, self._ending.monitor)
        self.stopped: str | None = None
        self.ended: str | None = None
        self.restored: EpochRecord | None = None
        self.final: Evaluation | None = None

    def fit(self, saved: Saved | None = None) -> list[EpochRecord]:
        """Train to the end (collective).

        The module is in training mode meanwhile and afterwards. When this returns, its weights and buffers
        are final, and equal on all ranks.

        Args:
            saved: where to go on; the replica has its weights, and the optimizer its state. None: at the
                beginning.

        Returns:
            One record for each epoch, those before `saved` too; equal on all ranks but for the times.

        Raises:
            BadModel, BadData, BadOption: model, data, loss and metrics do not fit; before the first step.
            NotFinite: the loss or a weight became NaN or inf.
        """
        module = self.replica.module
        self._stages.trace = self.worker.updating.trace = self._hooks.trace
        self._objective = check_fit(module, self._batches.part, self._objective)
        self._gradient.objective = self._objective
        if not module.training:
            module.train()
        check_smallest_batch(module, self._batches, arithmetic=self._objective.arithmetic)
        plan = self._validation_plan
        if plan is not None:
            task = ValidationTask(self.replica, plan.part, self.comm, self._objective)
            self._validation = VALIDATIONS.named(plan.how)(task)
        if saved is not None:
            self._load_state(saved)
        elif self._hooks.save is not None:
            self._remembered()  # What cannot be kept is refused before the first step.
        if self._agenda is not None:
            self._agenda.start(self._made, self._begun)
        length = RunLength(self._updates, self._batches.updates, self._counted)
        self._progress.begin(length, self._made)
        try:
            if self._hooks.callbacks is not None:
                if saved is not None:
                    self._hooks.callbacks.ask(saved.part("training").shared.get("asked"))
                self._hooks.callbacks.begin(self._made, self._history)
            with drawn_by_sample(module, self._batches.seed) as self._gradient.masks:
                self._run()
            # Outside: a model that is saved then has torch's own layers.
            if self.stopped is None and self._hooks.callbacks is not None:
                self._hooks.callbacks.end()
        finally:
            self._progress.end()
            if self._validation is not None:
                self._validation.close()
        return self._history

    def _run(self) -> None:
        """Train all epochs that are left, or until the run stops or ends."""
        while self._goes_on:
            self._note(self._epoch(self._begun))
            if self._agenda is not None and self._goes_on:
                self._pause_between_epochs(self._agenda)
        if self.ended is not None:
            self._end_early()

    @property
    def _made(self) -> int:
        """The steps that this rank has made since the run began, whatever batch each of them was of."""
        return self._step + self._counted

    @property
    def _begun(self) -> int:
        """The epochs that are over, or will be when their validation is known."""
        return len(self._history) + len(self._unvalidated)

    @property
    def _goes_on(self) -> bool:
        """True if there is another epoch to be trained, or the rest of one."""
        over = self.stopped is not None or self.ended is not None
        return not over and self._begun * self._batches.updates < self._updates

    def _note(self, records: Sequence[EpochRecord]) -> None:
        for record in records:
            self._history.append(record)
            self._learning_rate.note(record)
            self._progress.epoch(record)
            if self._hooks.on_epoch is not None:
                self._hooks.on_epoch(record)
            if self._hooks.callbacks is not None:
                self._hooks.callbacks.epoch(record)
        self._judge()

    def _judge(self) -> None:
        """Draw the conclusions from the figures of the epochs so far."""
        if self._best is not None:
            self._best.note(self._history)
        if self._goes_on:
            self.ended = self._ending.why(self._history)

    def _end_early(self) -> None:
        """Come to the end of the run after an epoch that was not to be the last one (collective).

        The final weights may be others than those that were evaluated after that epoch: workers may have had
        something to exchange yet.
        """
        self._keep_end(self._next_epoch(), early=True)
        self._meet(final=True)
        found = self._validate(final=True)
        self._note([replace(self._unvalidated.popleft(), validation=one) for one in found[:-1]])
        self._leave(self._history, found[-1])

    def _leave(self, history: Sequence[EpochRecord], found: Evaluation | None) -> None:
        """Put the final weights in place, those of the best epoch if need be, and write them (collective).

        Args:
            history: all epochs.
            found: of the weights that are there.
        """
        if self._best is not None:
            self.restored = self._best.restore(history)
        self.final = found if self.restored is None else self.restored.validation
        if self._hooks.checkpoint is not None:
            self._hooks.checkpoint()
            self._stages.lap("checkpoint")

    def _epoch(self, epoch: int) -> list[EpochRecord]:
        """Train an epoch; returns the records that are complete now, of this epoch and earlier ones."""
        began, tally = self._stages.start(), Tally(self._objective, matrix=False)
        if self._resumed is not None:
            began -= self._resumed.seconds
            tally.load_state(self._resumed.tally)
            self._resumed = None
        last = min(self._updates, (epoch + 1) * self._batches.updates)
        final, open_epoch = last == self._updates, OpenEpoch(epoch, began, tally)
        self._train(open_epoch, last)
        if self._agenda is not None and self._agenda.free:
            # The others may want to meet in the middle of theirs.
            while self.stopped is None and not self._pause(self._agenda, open_epoch, ended=True):
                pass
        if self.stopped is not None:
            self.worker.finish()
            return []
        if final:
            self._keep_end(open_epoch)
        self._meet(final)
        if self._best is not None:
            self._best.keep(epoch + 1)
        train = tally.total(self.comm)
        trained = self._stages.lap("wait" if self._everyone.size > 1 else "reduce")
        # Records are exchanged while the ranks are together, so that none waits for that alone.
        stays = final or self._validation is None or self._validation.meets
        ranks = [] if stays else self._ranks(tally.samples)
        evaluations = self._validate(final)
        ended = self._stages.lap("validation")
        record = EpochRecord(
            epoch=epoch + 1,
            step=self._made,
            complete=self._step == (epoch + 1) * self._batches.updates,
            train=train,
            validation=None,
            seconds={"validation": ended - trained, "total": ended - began},
            samples_per_s=_rate(train.samples, trained - began),
            lr=float(self._lr),
            time=now(),
            ranks=ranks,
        )
        if final:
            known = zip([*self._unvalidated, record], evaluations, strict=True)
            complete = (replace(one, validation=found) for one, found in known)
            self._leave([*self._history, *complete], evaluations[-1])
        if stays:
            record = replace(record, ranks=self._ranks(tally.samples))
        if self._hooks.trace is not None:
            self._hooks.trace.add(f"epoch {epoch + 1}", began, self._stages.last)
        self._unvalidated.append(record)
        return [replace(self._unvalidated.popleft(), validation=found) for found in evaluations]

    def _meet(self, final: bool) -> None:
        """Bring the workers together (collective): the replica gets the weights that are to be evaluated."""
        self._stages.divide(self.worker.traffic, self.worker.updating)
        self._progress.doing(WAITING)
        # Before anything collective: others may still wait for what this worker will exchange.
        if final:
            self.worker.finish()
        else:
            self.worker.settle()
        refuse_broken_weights(self.replica, self.comm.rank, self._made)
        average_buffers(self.replica, self.comm)
        for state in self._module_states:
            state.share_extra(self.comm)
        self._warn_of_attributes()
        self._gradient.skipped.keep_buffers()
        share_untrained(self.replica, self.comm)

    def _train(self, open_epoch: OpenEpoch, last: int) -> None:
        """Make the updates of one epoch, up to update number `last` of the run; or fewer, if it stops."""
        stages, on_step, callbacks = self._stages, self._hooks.on_step, self._hooks.callbacks
        first, agenda = self._step, self._agenda
        epoch, tally = open_epoch.number, open_epoch.tally
        start = epoch * self._batches.updates
        began = left = stages.start()
        report = began + self._progress.every_s
        self._waited()  # for what was looked at before
        for made, passes in self._batches.epoch(epoch, first - start, last - start):
            stages.lap("data", self._waited())
            if on_step is not None:
                on_step(made + self._counted)
                stages.start()
            self._learning_rate.step_until(made)
            loaded = stages.lap("update")
            late = self.worker.late
            samples, weight = (0, 0.0) if late else self._gradient.add(passes, self._step, epoch, tally)
            computed = stages.last
            if self._meets:
                self._arrivals.note(computed - left)
            self._lr = self._learning_rate.value
            if late or not (samples or not self._batches.own):
                self.worker.skip()
            elif self._gradient.is_usable(made, passes, self._step, epoch, samples, weight):
                self.worker.step()
                self._steps += 1
            else:
                self.worker.skip()
            if self._balance is not None:
                self._balance.note(samples, computed - loaded)
            self._step = made + 1
            left = now = stages.lap(EXCHANGE)
            if callbacks is not None:
                callbacks.step(self._made)
                now = stages.start()
            if now >= report:
                rate = _rate(self._batches.samples(self._step - first), now - began)
                found, passed = tally.here(glance=True), now - open_epoch.began
                self._progress.moment(Moment(epoch + 1, self._made, found, rate, passed))
                report = stages.start() + self._progress.every_s
            if agenda is not None and agenda.calls(self._made) and (agenda.free or self._step < last):
                self._pause(agenda, open_epoch)
                if self.stopped is not None:
                    return
                left = stages.last
        self._step = last
        self._learning_rate.step_until(last)
        stages.lap("update")
        if isinstance(tally.loss, Tensor):
            if last < self._updates:
                self._batches.prepare(epoch + 1)
            self._gradient.check_last(tally.loss, last, epoch)

    def _pause_between_epochs(self, agenda: Agenda) -> None:
        """Save the state, or stop, if that is due (collective)."""
        self._pause(agenda, self._next_epoch())
        if self.stopped is not None:
            self.worker.finish()

    def _next_epoch(self) -> OpenEpoch:
        tally = Tally(self._objective, matrix=False)
        return OpenEpoch(self._begun, self._stages.start(), tally)

    def _keep_end(self, open_epoch: OpenEpoch, early: bool = False) -> None:
        """Save the state that a longer run would go on from, if that is wanted (collective).

        Args:
            open_epoch: what such a run would be in the middle of.
            early: the run ends early.
        """
        if self._agenda is None or self._hooks.save is None:
            return
        if not self._agenda.keeps_end(early):
            return
        self.worker.settle()
        state = self._state(open_epoch, self._places(open_epoch, ended=True))
        # A longer run goes on behind the epoch that was to be the last one.
        state.shared["training"]["asked"] = None
        self._progress.doing(SAVING)
        self._hooks.save(self._made, state, Decision(save=True, end=True))
        self.worker.resume()
        self._stages.lap("checkpoint")

    def _pause(self, agenda: Agenda, open_epoch: OpenEpoch, ended: bool = False) -> bool:
        """Meet between two steps: save the state, and stop, if that is due (collective).

        Args:
            agenda: decides.
            open_epoch: what this rank is in the middle of.
            ended: whether it has made all updates of the epoch.

        Returns:
            Whether all ranks have; then nothing was decided.
        """
        began = self._stages.last
        self.worker.settle()
        places = self._places(open_epoch, ended)
        decision = None
        if not all(place.ended for place in places):
            decision = agenda.decide(self._made, open_epoch.number)
            if (decision.save or decision.copy) and self._hooks.save is not None:
                if decision.final:
                    # A slow disk may take any time.
                    self._progress.stopping(self._made)
                self._hooks.save(self._made, self._state(open_epoch, places), decision)
            self.stopped = decision.stop
        self.worker.resume()
        ended_at = self._stages.lap("checkpoint")
        if decision is not None and decision.copy:
            agenda.note_copy(ended_at - began)
        return decision is None

    def _places(self, open_epoch: OpenEpoch, ended: bool) -> list[PlaceInEpoch]:
        """Return where each rank is (collective); `ended`: whether this one has made all its updates."""
        start = open_epoch.number * self._batches.updates
        found = open_epoch.tally.sums_here()
        here = PlaceInEpoch(
            ended,
            self._step - start,
            found.counts.tolist(),
            found.sums.tolist(),
            self._steps,
            self._gradient.skipped.left_out,
            self.worker.traffic.counts(),
            self._stages.seconds(),
            self.worker.traffic.wait_s,
        )
        return cast("list[PlaceInEpoch]", self.comm.all_gather_objects(here))

    def _state(self, open_epoch: OpenEpoch, places: Sequence[PlaceInEpoch]) -> State:
        """Return all that must be known to go on from here (collective); the workers have settled."""
        worker, tally = self.worker.state(), open_epoch.tally
        batches = self._batches.state(open_epoch.number, [place.round for place in places])
        validation = State() if self._validation is None else self._validation.state()
        balance = State() if self._balance is None else self._balance.state()
        module = self.replica.module
        names = {parameter: name for name, parameter in module.named_parameters()}
        remembered = self._remembered()
        scale = None if self._gradient.scale is None else self._gradient.scale.state()
        callbacks = self._hooks.callbacks
        shared = {
            "epoch": open_epoch.number,
            "updates": self._updates,
            "per_epoch": self._batches.updates,
            "made": self._made,
            "counted": self._counted,
            "places": [asdict(place) for place in places],
            "rows": list(tally.gather(tally.sums_here().rows, self.comm)),
            "seconds": self._stages.last - open_epoch.began,
            "lr": float(self._lr),
            "groups": names_in_groups(self._optimizer, names),
            "names": names_in_state(module),
            "schedule": self._learning_rate.state(),
            "buffers": mean_buffers(module, self.comm),
            "remembered": remembered,
            "scale": scale,
            "history": [to_json(record) for record in self._history],
            "unvalidated": [to_json(record) for record in self._unvalidated],
            "asked": None if callbacks is None else callbacks.why_end(),
        }
        own = {
            "buffers": named_buffers(self.replica.module),
            "remembered": remembered,
            "random": random_state(),
            "tally": tally.state(),
            "schedule": self._learning_rate.state(),
            "steps": self._steps,
            "scale": scale,
            "left_out": self._gradient.skipped.state(),
            "stages": self._stages.seconds(),
            "traffic": self.worker.traffic.values(),
        }
        best = State() if self._best is None else self._best.state()
        parts = {
            "worker": worker,
            "batches": batches,
            "validation": validation,
            "balance": balance,
            "best": best,
        }
        pieces = [*self._weights(), *worker.joint.pieces, *best.joint.pieces]
        return State(
            joint=Held(pieces, worker.joint.numbers),
            alone=worker.alone,
            shared={"training": shared, **{name: part.shared for name, part in parts.items()}},
            own={"training": own, **{name: part.own for name, part in parts.items()}},
        )

    def _weights(self) -> Iterator[TensorPiece]:
        """Yield this rank's part of the model's parameters, or of the portion that it has of the model."""
        laid = {parameter for flat in self.replica.flats for parameter in flat.parameters}
        for flat in self.replica.flats:
            mine = equal_slices(flat, self.comm.size)[self.comm.rank]
            yield from pieces_of("weights", flat, flat.weights, mine)
        for name, parameter in self.replica.module.named_parameters():
            scattered = type(parameter.data) is not Tensor
            if parameter not in laid and (scattered or self.comm.rank == 0):
                yield whole_piece(name_of("weights", name), parameter)

    def _load_state(self, saved: Saved) -> None:
        """Go on from an earlier state (collective); weights and optimizer have theirs."""
        training = saved.part("training")
        at, own = training.shared, training.own
        epoch, places = at["epoch"], [PlaceInEpoch(**place) for place in at["places"]]
        self._history = [parse_record(text, EpochRecord) for text in at["history"]]
        self._unvalidated.extend(parse_record(text, EpochRecord) for text in at["unvalidated"])
        first = self._batches.load_state(epoch, saved.part("batches"))
        self._step = epoch * self._batches.updates + first
        if own is not None:
            place = places[self.comm.rank]
            self._step = epoch * self._batches.updates + place.round
            self._counted = at["counted"]
            tally = own["tally"]
            self._steps = own["steps"]
            self._stages.load(own["stages"])
            self.worker.traffic.load(own["traffic"])
            load_random_state(own["random"])
            left_out = own["left_out"]
        else:
            # Steps go on being counted, however many an epoch has from here on.
            self._counted = at["made"] - self._step
            # What those have done who are no more counts as the first one's.
            rank, gone = self.comm.rank, places[self.comm.size :] if self.comm.rank == 0 else []
            mine = [*places[rank : rank + 1], *gone]
            counts = [place.counts for place in mine] or [[0] * len(places[0].counts)]
            sums = [place.sums for place in mine] or [[0.0] * len(places[0].sums)]
            tally = {
                "counts": torch.tensor(counts).sum(dim=0),
                "sums": torch.tensor(sums, dtype=torch.float64).sum(dim=0),
                "rows": at["rows"] if rank == 0 else [],
                "kept": [],
            }
            # An update that all have made together is one of each.
            counted = mine if self._batches.own else places[rank : rank + 1]
            self._steps = sum(place.steps for place in counted)
            self.worker.traffic.load_counts([place.traffic for place in counted])
            left_out = [0, sum(place.left_out for place in mine), 0]
            # Seconds of several ranks are no time of one.
            for place in places[rank : rank + 1]:
                self._stages.load(place.stages)
                self.worker.traffic.wait_s += place.wait_s
        self._resumed = Resumed(at["seconds"], tally)
        load_buffers(self.replica.module, at["buffers"] if own is None else own["buffers"])
        remembered = (own or at)["remembered"]
        for state, values in zip(self._module_states, remembered["extra"], strict=True):
            state.load_extra(values)
        load_buffers(self._loss_module, remembered["buffers"])
        if self._hooks.callbacks is not None:
            self._hooks.callbacks.load_state(remembered["callbacks"])
        scale = (own or at)["scale"]
        if self._gradient.scale is not None and scale is not None:
            self._gradient.scale.load_state(scale)
        self._gradient.skipped.load_state(left_out)
        scale = self._batches.batch_size / saved.part("batches").shared["batch_size"]
        alike = self._schedule.has_length_of(at)
        self._learning_rate.load_state((own or at)["schedule"], self._step, alike, scale)
        self._lr = at["lr"]
        if "worker" in saved.shared:  # Otherwise it was another strategy's.
            self.worker.load_state(saved.part("worker"))
        if self._validation is not None:
            self._validation.load_state(saved.part("validation"))
        if self._balance is not None:
            self._balance.load_state(saved.part("balance"))
        if self._best is not None:
            self._best.load_state(saved.part("best"))
        self._judge()
        self.comm.barrier()

    def _warn_of_attributes(self) -> None:
        """Warn once, on rank 0, of attributes that no state has."""
        if self._attributes is not None and (text := self._attributes.warning()) is not None:
            self._attributes = None
            if self.comm.rank == 0:
                warn_on_stderr(text)

    def _remembered(self) -> Values:
        """Return the extra states of model and loss, the loss's buffers, and the states of callbacks."""
        callbacks = self._hooks.callbacks
        return {
            "extra": [state.extra() for state in self._module_states],
            "buffers": named_buffers(self._loss_module),
            "callbacks": {} if callbacks is None else callbacks.state(),
        }

    def _waited(self) -> Mapping[str, float]:
        """Return the seconds for which this rank has waited for files, if real time is measured."""
        return self._batches.waited() if self._real_time else {}

    def _validate(self, final: bool) -> Sequence[Evaluation | None]:
        """Evaluate the weights; return the results that are known now, of this epoch and earlier ones."""
        if self._validation is not None:
            self._progress.doing(VALIDATING)
            self._validation.begin()
        if not final:
            self.worker.resume()
        return [None] if self._validation is None else self._validation.collect(everything=final)

    def _ranks(self, samples: int) -> list[RankRecord]:
        """Work of each rank since it was last asked (collective)."""
        stages, measuring_s = self._stages.take(self._look_s)
        exchanged = self.worker.traffic.take().figures()
        left_out = self._gradient.skipped.take()
        mine = RankRecord(self._steps, samples, stages, measuring_s, **exchanged, left_out=left_out)
        self._steps = 0
        found = self._everyone.all_gather_objects((mine, self._arrivals.take()))
        return compared(cast("list[tuple[RankRecord, bytes]]", found))


def _rate(samples: int, seconds: float) -> float:
    """Samples per second; 0 where no time has passed, as on a virtual clock that nothing moves."""
    return samples / seconds if seconds > 0 else 0.0
