"""A cross-validation with Lightning, as trials of Optuna: python folds_with_optuna.py QUESTION

Each trial has a process of its own with one thread, forked from a server that has imported torch and
Lightning. Nothing is logged or saved; batches are taken from memory as a whole.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

import lightning
import optuna
import torch
from folds import Done, Question, build, open_fold, optimizer_of, read_question, schedule_of, tell
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, question, job, fold) -> None:
        super().__init__()
        self.network = build(job, fold.inputs)
        self.question, self.job, self.samples = question, job, len(fold.targets)

    def training_step(self, batch, index):
        inputs, targets = batch
        return cross_entropy(self.network(inputs), targets)

    def validation_step(self, batch, index):
        inputs, targets = batch
        outputs = self.network(inputs)
        self.log("loss", cross_entropy(outputs, targets), batch_size=len(targets))
        self.log("accuracy", (outputs.argmax(1) == targets).double().mean(), batch_size=len(targets))

    def configure_optimizers(self):
        optimizer = optimizer_of(self.network)
        rate = schedule_of(self.question, self.job, optimizer, self.samples)
        if rate is None:
            return optimizer
        by_epoch = isinstance(rate, ReduceLROnPlateau)
        how = {"scheduler": rate, "interval": "epoch" if by_epoch else "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": how}


def loader(inputs, targets, sampler, batch_size) -> DataLoader:
    samples = TensorDataset(inputs, targets)
    # Whole batches by one index are several times as fast as sample by sample.
    return DataLoader(samples, sampler=BatchSampler(sampler(samples), batch_size, False), batch_size=None)


def train(question: Question, number: int, answers) -> None:
    began = time.time()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    job = question.jobs()[number]
    fold = open_fold(question, job.fold, *question.samples())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=question.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        Classifier(question, job, fold),
        loader(fold.inputs, fold.targets, RandomSampler, question.batch_size),
        loader(fold.held_inputs, fold.held_targets, SequentialSampler, len(fold.held_targets)),
    )
    answers.send(Done(began, time.time(), trainer.callback_metrics["accuracy"].item()))


def main() -> None:
    question = read_question(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    # The server finds the module of this program only there, and says nothing if it does not.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["folds_with_optuna"])
    done: dict[int, Done] = {}

    def objective(trial: optuna.Trial) -> float:
        number = trial.suggest_int("job", 0, len(question.jobs()) - 1)
        answers, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=train, args=(question, number, theirs))
        process.start()
        theirs.close()
        done[number] = answers.recv()
        process.join()
        return done[number].accuracy

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    for number in range(len(question.jobs())):
        study.enqueue_trial({"job": number})
    study.optimize(objective, n_trials=len(question.jobs()), n_jobs=question.cores)
    tell([done[number] for number in range(len(question.jobs()))])


if __name__ == "__main__":
    main()
