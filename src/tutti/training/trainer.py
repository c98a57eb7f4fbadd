"""The training loop: forward, backward and the strategy's step, with records and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import cast

from torch import Tensor

from tutti.comm.base import Communicator
from tutti.optim.sharded import equal_slices
from tutti.optim.state import names_in_groups
from tutti.records.heartbeat import SAVING, VALIDATING, WAITING
from tutti.records.run import EpochRecord, Evaluation, RankRecord, now
from tutti.records.texts import RunLength
from tutti.state import LocalState, Saved, State, TensorPiece, Values, name_of, pieces_of, whole_piece
from tutti.training.agenda import Agenda, Decision
from tutti.training.batch_norm import normalising
from tutti.training.best_weights import BestWeights
from tutti.training.dropout import drawn_by_sample
from tutti.training.evaluation import (
    Objective,
    Tally,
    average_buffers,
    load_buffers,
    mean_buffers,
    named_buffers,
)
from tutti.training.finite import refuse_broken_weights
from tutti.training.learning_rate import LearningRate
from tutti.training.module_state import ModuleState, load_random_state, random_state
from tutti.training.preflight import check_fit, check_smallest_batch
from tutti.training.progress import Moment
from tutti.training.run_course import OpenEpoch, TrainingState
from tutti.training.run_parts import Hooks, Schedule, Workers
from tutti.training.stopping import Ending
from tutti.training.timers import EXCHANGE, RankWork
from tutti.training.update_gradient import UpdateGradient
from tutti.training.validation import Validation, ValidationPlan
from tutti.training.validation.background import Background
from tutti.training.weight_average import WeightAverage
from tutti.training.weights import names_in_state


class Trainer:
    """Trains a replica, on every rank of a communicator at once.

    Args:
        workers: the ranks, and how this one computes and steps.
        objective: loss, metrics and arithmetic, which has prepared the module.
        schedule: the batches, and the number of updates.
        validation: the part to evaluate after every epoch.
        hooks: the observers of the run.
        agenda: decides when to save the state, and whether to stop early.
        ending: decides whether the epochs' figures end the run, and which weights it leaves.

    Attributes:
        course: the progress of the run, and its end.
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
        self.replica, self.worker, self.course = workers.replica, workers.worker, TrainingState()
        self._workers, self._schedule = workers, schedule
        self._hooks, self._agenda, self._ending = hooks or Hooks(), agenda, ending or Ending()
        clock = perf_counter if workers.seconds_per_sample is None else workers.comm.clock
        self._work = RankWork(clock, self.worker.traffic)
        self.worker.updating.clock = clock
        self._work.stages.trace = self.worker.updating.trace = self._hooks.trace
        self._gradient = UpdateGradient(workers, objective, schedule, self._work.stages)
        self._learning_rate = LearningRate(workers.optimizer, schedule.scheduler, schedule.stepped)
        self._modules = ModuleState(self.replica.module)
        self._plan, self._validation = validation, cast("Validation | None", None)
        monitor = self._ending.monitor if self._ending.restores_best else None
        self._best = BestWeights(self.replica, self._comm, monitor)
        self._average = WeightAverage(self._ending.average, workers, schedule, objective.arithmetic)

    def fit(self, saved: Saved | None = None) -> list[EpochRecord]:
        """Train to the end (collective), from `saved` if given; return one record for each epoch.

        The module is in training mode meanwhile and afterwards. On return its weights and buffers are final,
        and equal on all ranks. The records include those before `saved`, and are equal on all ranks but for
        the times.

        Raises:
            BadModel, BadData, BadOption: model, data, loss and metrics do not fit; before the first step.
            NotFinite: the loss or a weight became NaN or inf.
        """
        module, batches, course = self.replica.module, self._schedule.batches, self.course
        hooks, callbacks = self._hooks, self._hooks.callbacks
        sharing = self._workers.sharing(batches)
        together = sharing is not None and sharing.size > 1
        objective = check_fit(module, batches.part, self._gradient.objective, together)
        self._gradient.objective = objective
        if not module.training:
            module.train()
        check_smallest_batch(module, batches, self._workers.statistics is not None, objective.arithmetic)
        if self._plan is not None:
            way = Background if self._plan.how == "background" else Validation
            self._validation = way(self.replica, self._plan.part, self._comm, objective)
        if saved is not None:
            self._load_state(saved)
        elif hooks.save is not None:
            # Refuse a value that cannot be stored before the first step.
            self._modules.extra()
            if callbacks is not None:
                callbacks.state()
        if self._agenda is not None:
            self._agenda.start(course.made, course.begun)
        hooks.progress.begin(RunLength(self._updates, batches.updates, course.counted), course.made)
        try:
            if callbacks is not None:
                callbacks.begin(course.made, course.history)
            with (
                normalising(module, self._workers.statistics),
                drawn_by_sample(module, batches.seed) as self._gradient.masks,
            ):
                while self._goes_on:
                    self._note(self._epoch(course.begun))
                    if self._agenda is not None and self._goes_on:
                        self._pause(self._agenda, self._next_epoch())
                        if course.stopped is not None:
                            self.worker.finish()
                if course.ended is not None:
                    self._end_early()
            # Outside the block: a callback that saves the model saves torch's own layers.
            if course.stopped is None and callbacks is not None:
                callbacks.end()
        finally:
            hooks.progress.end()
            if self._validation is not None:
                self._validation.close()
        return course.history

    @property
    def _comm(self) -> Communicator:
        return self._workers.comm

    @property
    def _updates(self) -> int:
        return self._schedule.updates

    @property
    def _goes_on(self) -> bool:
        """True if there is another epoch to train, or the rest of one."""
        course = self.course
        return not course.over and course.begun * self._schedule.batches.updates < self._updates

    def _note(self, records: Sequence[EpochRecord]) -> None:
        for record in records:
            self.course.history.append(record)
            self._learning_rate.note(record)
            self._hooks.progress.epoch(record)
            if self._hooks.on_epoch is not None:
                self._hooks.on_epoch(record)
            if self._hooks.callbacks is not None:
                self._hooks.callbacks.epoch(record)
        self._judge()

    def _judge(self) -> None:
        """Decide from the figures of the epochs which weights to keep, and whether the run ends."""
        self._best.note(self.course.history)
        if self._goes_on:
            self.course.ended = self._ending.why(self.course.history)

    def _end_early(self) -> None:
        """End the run after an epoch before the last one (collective).

        The workers' last exchange may have changed the weights since that epoch's validation.
        """
        self._keep_end(self._next_epoch(), early=True)
        self._meet(final=True)
        self._average.show()
        if self._ending.average is not None and not self._average.count:
            self.course.ended = f"{self.course.ended}; the weights are not averaged: --average had not begun"
        results = self._validate(final=True)
        self._note(self.course.complete(results[:-1]))
        self._leave(self.course.history, results[-1])

    def _leave(self, history: Sequence[EpochRecord], evaluation: Evaluation | None) -> None:
        """Put the final weights, or the best epoch's, in place and write them (collective)."""
        restored = self.course.restored = self._best.restore(history)
        self.course.final = evaluation if restored is None else restored.validation
        if self._hooks.checkpoint is not None:
            self._hooks.checkpoint()
            self._work.stages.lap("checkpoint")

    def _epoch(self, epoch: int) -> list[EpochRecord]:
        """Train an epoch; return the records that are complete now."""
        course, stages, updates = self.course, self._work.stages, self._schedule.batches.updates
        open_epoch, course.resumed = course.resumed or self._next_epoch(), None
        stages.start()
        tally, last = open_epoch.tally, min(self._updates, (epoch + 1) * updates)
        final = last == self._updates
        self._train(open_epoch, last)
        if self._agenda is not None and self._agenda.free:
            # The others may want to meet in the middle of theirs.
            while course.stopped is None and not self._pause(self._agenda, open_epoch, ended=True):
                pass
        if course.stopped is not None:
            self.worker.finish()
            return []
        if final:
            self._keep_end(open_epoch)
        self._meet(final)
        self._average.add(last, epoch_of=last - epoch * updates)
        self._average.show()
        self._best.keep(epoch + 1)
        train = tally.total(self._comm)
        trained = stages.lap("wait" if (self._workers.everyone or self._comm).size > 1 else "reduce")
        evaluations = self._validate(final)
        ended = stages.lap("validation")
        record = EpochRecord(
            epoch=epoch + 1,
            step=course.made,
            complete=course.step == (epoch + 1) * updates,
            train=train,
            validation=None,
            seconds={"validation": ended - trained, "total": ended - open_epoch.began},
            samples_per_s=_rate(train.samples, trained - open_epoch.began),
            lr=float(course.lr),
            time=now(),
        )
        if final:
            known = zip([*course.unvalidated, record], evaluations, strict=True)
            complete = (replace(one, validation=found) for one, found in known)
            self._leave([*course.history, *complete], evaluations[-1])
        record = replace(record, ranks=self._ranks(tally.samples))
        if self._hooks.trace is not None:
            self._hooks.trace.add(f"epoch {epoch + 1}", open_epoch.began, stages.last)
        course.unvalidated.append(record)
        return course.complete(evaluations)

    def _meet(self, final: bool) -> None:
        """Bring the workers together (collective): the replica gets the weights to evaluate."""
        self._work.stages.divide(self.worker.traffic, self.worker.updating)
        self._hooks.progress.doing(WAITING)
        # Before other collectives: a peer may still wait for this worker's exchange.
        if final:
            self.worker.finish()
        else:
            self.worker.settle()
        refuse_broken_weights(self.replica, self._comm.rank, self.course.made)
        average_buffers(self.replica, self._comm)
        self._modules.share_extra(self._comm)
        self._gradient.skipped.keep_buffers()

    def _train(self, open_epoch: OpenEpoch, last: int) -> None:
        """Make the updates of one epoch, up to update `last` of the run, unless the run stops."""
        course, work, stages, gradient = self.course, self._work, self._work.stages, self._gradient
        batches, balance, meets = self._schedule.batches, self._schedule.balance, self._workers.meets
        on_step, callbacks, progress = self._hooks.on_step, self._hooks.callbacks, self._hooks.progress
        first, agenda, learning_rate, worker = course.step, self._agenda, self._learning_rate, self.worker
        epoch, tally = open_epoch.number, open_epoch.tally
        start = epoch * batches.updates
        began = left = stages.start()
        report = began + progress.every_s
        self._waited()  # forgets earlier waits
        for made, passes in batches.epoch(epoch, first - start, last - start):
            stages.lap("data", self._waited())
            if on_step is not None:
                on_step(made + course.counted)
                stages.start()
            learning_rate.step_until(made)
            loaded = stages.lap("update")
            late = worker.late
            samples, weight = (0, 0.0) if late else gradient.add(passes, course.step, epoch, tally)
            computed = stages.last
            if meets:
                work.note_arrival(computed - left)
            course.lr = learning_rate.value
            if late or not passes:
                worker.skip()
            elif gradient.is_usable(passes, course.step, epoch, samples, weight):
                worker.step()
                self._average.add(made + 1)
                work.steps += 1
            else:
                worker.skip()
            if balance is not None:
                balance.note(samples, computed - loaded)
            course.step = made + 1
            left = now = stages.lap(EXCHANGE)
            if callbacks is not None:
                callbacks.step(course.made)
                now = stages.start()
            if now >= report:
                rate = _rate(batches.samples(course.step - first), now - began)
                progress.moment(Moment(epoch + 1, course.made, tally.here(), rate))
                report = stages.start() + progress.every_s
            if agenda is not None and agenda.calls(course.made) and (agenda.free or course.step < last):
                self._pause(agenda, open_epoch)
                if course.stopped is not None:
                    return
                left = stages.last
        course.step = last
        learning_rate.step_until(last)
        stages.lap("update")
        if isinstance(tally.loss, Tensor):
            if last < self._updates:
                batches.prepare(epoch + 1)
            gradient.check_losses(tally.loss, last, epoch)

    def _next_epoch(self) -> OpenEpoch:
        tally = Tally(self._gradient.objective, matrix=False)
        return OpenEpoch(self.course.begun, self._work.stages.start(), tally)

    def _keep_end(self, open_epoch: OpenEpoch, early: bool = False) -> None:
        """Save the state from which a longer run would continue, if wanted (collective)."""
        if self._agenda is None or self._hooks.save is None or not self._agenda.keeps_end(early):
            return
        self.worker.settle()
        state = self._state(open_epoch, [place for place, _ in self._places(open_epoch, ended=True)])
        self._hooks.progress.doing(SAVING)
        self._hooks.save(self.course.made, state, Decision(save=True, end=True))
        self.worker.resume()
        self._work.stages.lap("checkpoint")

    def _pause(self, agenda: Agenda, open_epoch: OpenEpoch, ended: bool = False) -> bool:
        """Meet between two steps; save the state and stop, if due (collective).

        Return whether all ranks have made all their rounds of the epoch; then nothing was decided.
        """
        began, made = self._work.stages.last, self.course.made
        self.worker.settle()
        places = self._places(open_epoch, ended)
        decision = None
        if not all(over for _, over in places):
            decision = agenda.decide(made, open_epoch.number)
            if (decision.save or decision.copy) and self._hooks.save is not None:
                if decision.final:
                    self._hooks.progress.doing(SAVING, made)
                state = self._state(open_epoch, [place for place, _ in places])
                self._hooks.save(made, state, decision)
            self.course.stopped = decision.stop
        self.worker.resume()
        ended_at = self._work.stages.lap("checkpoint")
        if decision is not None and decision.copy:
            agenda.note_copy(ended_at - began)
        return decision is None

    def _places(self, open_epoch: OpenEpoch, ended: bool) -> list[tuple[int, bool]]:
        """Return each rank's next round of the epoch, and whether it has made all (collective)."""
        here = self.course.step - open_epoch.number * self._schedule.batches.updates, ended
        return cast("list[tuple[int, bool]]", self._comm.all_gather_objects(here))

    def _state(self, open_epoch: OpenEpoch, rounds: Sequence[int]) -> State:
        """Return the state to continue from (collective); the workers have settled."""
        module, schedule, gradient = self.replica.module, self._schedule, self._gradient
        worker, callbacks = self.worker.state(), self._hooks.callbacks
        parts = {
            "worker": worker,
            "batches": schedule.batches.state(open_epoch.number, rounds),
            "best": self._best.state(),
            "average": self._average.state(),
        }
        if self._validation is not None:
            parts["validation"] = self._validation.state()
        names = {parameter: name for name, parameter in module.named_parameters()}
        # The same number of ranks resumes with each rank's own, another number with rank 0's.
        both = {
            "extra": self._modules.extra(),
            "callbacks": {} if callbacks is None else callbacks.state(),
            "schedule": self._learning_rate.state(),
            "scale": None if gradient.scale is None else gradient.scale.state(),
        }
        shared = {
            **both,
            **self.course.state(),
            "epoch": open_epoch.number,
            "updates": self._updates,
            "per_epoch": schedule.batches.updates,
            "tally": open_epoch.tally.total_state(self._comm),
            "seconds": self._work.stages.last - open_epoch.began,
            "groups": names_in_groups(self._workers.optimizer, names),
            "names": names_in_state(module),
            "buffers": mean_buffers(module, self._comm),
        }
        own = {
            **both,
            "buffers": named_buffers(module),
            "random": random_state(),
            "tally": open_epoch.tally.state(),
            "left_out": gradient.skipped.left_out,
            "steps": self._work.steps,
        }
        pieces = [*self._weights(), *worker.joint.pieces]
        pieces += [*parts["best"].joint.pieces, *parts["average"].joint.pieces]
        return State(
            joint=LocalState(pieces, worker.joint.numbers),
            alone=worker.alone,
            shared={"training": shared, **{name: part.shared for name, part in parts.items()}},
            own={"training": own, **{name: part.own for name, part in parts.items()}},
        )

    def _weights(self) -> Iterator[TensorPiece]:
        """Yield this rank's part of the parameters."""
        laid = {parameter for flat in self.replica.flats for parameter in flat.parameters}
        for flat in self.replica.flats:
            mine = equal_slices(flat, self._comm.size)[self._comm.rank]
            yield from pieces_of("weights", flat, flat.weights, mine)
        for name, parameter in self.replica.module.named_parameters():
            scattered = type(parameter.data) is not Tensor
            if parameter not in laid and (scattered or self._comm.rank == 0):
                yield whole_piece(name_of("weights", name), parameter)

    def _load_state(self, saved: Saved) -> None:
        """Continue from an earlier state (collective); weights and optimizer are loaded."""
        training, batches, gradient = saved.part("training"), self._schedule.batches, self._gradient
        at, own = training.shared, training.own
        first = batches.load_state(at["epoch"], saved.part("batches"))
        step = at["epoch"] * batches.updates + first
        self.course.load_state(at, step, same_ranks=own is not None)
        tally = Tally(gradient.objective, matrix=False)
        if own is not None:
            self._work.steps = own["steps"]
            gradient.skipped.left_out = own["left_out"]
            load_random_state(own["random"])
            tally.load_state(own["tally"])
        elif self._comm.rank == 0:
            tally.load_state(at["tally"])
        self.course.resumed = OpenEpoch(at["epoch"], self._work.stages.start() - at["seconds"], tally)
        mine: Values = own or at
        load_buffers(self.replica.module, mine["buffers"])
        gradient.skipped.keep_buffers()
        self._modules.load_extra(mine["extra"])
        if self._hooks.callbacks is not None:
            self._hooks.callbacks.load_state(mine["callbacks"])
        if gradient.scale is not None and mine["scale"] is not None:
            gradient.scale.load_state(mine["scale"])
        self._learning_rate.load_state(mine["schedule"], step, self._schedule.has_length_of(at))
        if "worker" in saved.shared:  # absent where another strategy saved it
            self.worker.load_state(saved.part("worker"))
        if self._validation is not None:
            self._validation.load_state(saved.part("validation"))
        self._best.load_state(saved.part("best"))
        self._average.load_state(saved.part("average"))
        self._judge()
        self._comm.barrier()

    def _waited(self) -> Mapping[str, float]:
        """Return the seconds of waiting for files, if real time is measured."""
        return self._schedule.batches.part.waited_s() if self._workers.seconds_per_sample is None else {}

    def _validate(self, final: bool) -> Sequence[Evaluation | None]:
        """Evaluate the weights; return the results known so far."""
        if self._validation is not None:
            self._hooks.progress.doing(VALIDATING)
            self._validation.begin()
        if not final:
            self._average.hide()
            self.worker.resume()
        return [None] if self._validation is None else self._validation.collect(everything=final)

    def _ranks(self, samples: int) -> list[RankRecord]:
        """Return each rank's work since the last call (collective)."""
        left_out, everyone = self._gradient.skipped.take(), self._workers.everyone or self._comm
        return self._work.records(samples, left_out, everyone)


def _rate(samples: int, seconds: float) -> float:
    """Return samples per second; 0 if no time has passed, as on a virtual clock."""
    return samples / seconds if seconds > 0 else 0.0
