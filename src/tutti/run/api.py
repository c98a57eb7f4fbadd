"""`tutti.train`: training from a script or a notebook."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from tutti import models
from tutti.data.contents import with_weights
from tutti.data.items import unloaded
from tutti.data.tables import OF_ALL, TABLE_OPTIONS
from tutti.errors import BadOption, RunStopped, UnknownName, refuse_other
from tutti.launch.start import ONE_AT_A_TIME
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.records.texts import figures, plural
from tutti.run.arguments import as_arguments
from tutti.run.build import seeded
from tutti.run.config import OBJECT, Options, TrainConfig, or_listed, synonyms, with_defaults
from tutti.run.jobs import Recipe
from tutti.run.pickled_arguments import by_name
from tutti.run.resume import Resume, going_on, placed
from tutti.run.start import run
from tutti.run.train_job import RunOutcome, TrainJob, outcome_again
from tutti.run.trained import TrainedModel
from tutti.strategies import Strategy
from tutti.terminal import lasting_output
from tutti.training.callbacks import Callback
from tutti.training.loggers import figures_of
from tutti.training.precision import Arithmetic
from tutti.training.weights import bring_back, read_weights


@dataclass(frozen=True, repr=False)
class Result:
    """The result of `tutti.train`.

    Attributes:
        model: the trained model: the caller's own module when one was given.
        history: one record for each epoch.
        summary: the totals, and the evaluation on the test part (`summary.test`).
        config: the resolved configuration.
        folder: the run folder; None without one.
        data: the training data, as the model saw them.
    """

    model: nn.Module
    history: list[EpochRecord]
    summary: Summary
    config: TrainConfig
    folder: Path | None
    data: TrainedOn

    @override
    def __repr__(self) -> str:
        judged = self.summary.test or self.summary.validation
        part = "validation" if self.summary.test is None else "test"
        shown = "" if judged is None else f", {part} {figures(judged)}"
        name, epochs = self.config.model.removeprefix(OBJECT), plural(self.summary.epochs, "epoch")
        return f"Result({name} on {self.data.name}, {epochs}{shown}, folder={self.folder})"

    def predict(self, inputs: object) -> NDArray[Any]:
        """Predict the class of each sample by its name, or by its number if it has none; or numbers.

        Args:
            inputs: in the form of the training data: an array of shape (samples, ...), or a table with the
                columns of the training, which is prepared the same way.

        Returns:
            An array of shape (samples,), or (samples, ...).

        Raises:
            BadData: they have another shape or kind.
        """
        return self.trained().predict(inputs)

    def probabilities(self, inputs: object) -> NDArray[Any]:
        """Compute the probability of each class, of shape (samples, ...), or raise BadData; see `predict`."""
        return self.trained().probabilities(inputs)

    def trained(self) -> TrainedModel:
        """Return the model with the scale and the labels of its data, like `tutti.load`."""
        return TrainedModel(self.config, self.data, self.config.device, self.model).eval()

    def frame(self) -> Any:
        """Return the figures of every epoch, one row each: "train/loss", "validation/accuracy", "lr", ...

        Returns:
            A data frame if pandas is installed, else a list of dicts.
        """
        rows = [figures_of(record) for record in self.history]
        return rows if find_spec("pandas") is None else import_module("pandas").DataFrame(rows)


class TrainOptions(TypedDict, total=False):
    """The `**options` of `tutti.train`: the other fields of `TrainConfig`."""

    model_options: Options
    data_options: Options
    target: str | int | Sequence[str | int] | None
    validation: float
    test: float
    split: str | None
    predictions: bool
    validate: str
    strategy_options: Options
    parallel: str | None
    parallel_options: Options
    hosts: str | None
    servers: int
    levels: int
    server_period: int | None
    balance: str
    threads: int | None
    epochs: int | None
    steps: int | None
    weights: str | Path | None
    monitor: str | None
    patience: int | None
    goal: float | str | None
    restore_best: bool
    average: str | None
    time_limit: str | None
    batch_size: int
    accumulate: int
    optimizer_options: Options
    lr: float | str | None
    schedule_options: Options
    augment_options: Options
    loss_options: Options
    class_weights: str | Sequence[float] | None
    clip_norm: float | None
    clip_value: float | None
    batch_norm: str
    precision: str
    layout: str
    device: str
    cuda_graph: str
    seed: int
    checkpoint: str
    keep: int
    on_failure: str
    hang_timeout: str
    skip_nonfinite: int
    log: str
    out: str | Path | None


@as_arguments()
def train(
    model: str | nn.Module | Callable[..., nn.Module] = "cnn",
    data: object = "digits",
    *,
    strategy: str | Strategy | None = None,
    workers: int | str = "auto",
    optimizer: str | Callable[..., Optimizer] | None = None,
    schedule: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., torch.Tensor] = "auto",
    metrics: str | Callable[..., torch.Tensor] | Sequence[str | Callable[..., torch.Tensor]] = "auto",
    sampling: object = None,
    sample_weight: object = None,
    augment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    callbacks: str | Callback | Sequence[str | Callback] = (),
    quiet: bool = False,
    trace: bool = False,
    resume: str | Path | None = None,
    **options: Unpack[TrainOptions],
) -> Result:
    """Train a model in parallel, and wait for the result.

    The ranks are new processes, which get the arguments by value: a script needs no guard such as
    `if __name__ == "__main__"`, and functions and classes of a notebook can be used. In a program that mpirun
    or srun started, its own ranks train instead.

    Args:
        model: a name ("mlp", "package.module:factory", "file.py:factory"), an `nn.Module` with the initial
            weights, or a function or class that makes one (called with `model_options`, and with `shape` and
            `outputs` if it takes them).
        data: a name or path, arrays (inputs, targets), ((inputs, targets), (test inputs, test targets)), a
            torch `Dataset` or a pair of them, a DataLoader (its data set and batch size are taken; one with
            its own `collate_fn` or sampler is refused), a table of pandas, polars or pyarrow, or a function
            that makes a data set. Several inputs are a dict or a tuple in place of one. Floats are kept as
            float32; as float64 with `precision="fp64"`.
        strategy: the way to train in parallel, such as `tutti.Sync()`; by default sync, or solo for one
            worker.
        workers: the number of ranks; "auto" is one for each core that may be used.
        optimizer: a name of `torch.optim`, an optimizer class, or a function of the list of parameters; by
            default adam.
        schedule: a name of `torch.optim.lr_scheduler`, or a function of the optimizer; stepped after each
            update.
        loss: a name, a loss module of torch, or a function (outputs, targets) -> mean over the samples, or
            (sum of the losses, weight to divide it by): the sum is divided by the weight of the whole
            batch, over all ranks and passes.
        metrics: comma-separated names, or a list of names and functions: (outputs, targets) -> one value a
            sample, or a number for all of them; or as scikit-learn's, (y_true, y_pred) -> a number.
        sampling: draws the samples of an epoch with replacement: "balanced", each class equally often, or a
            weight for each training sample, as an array or the path of an NPY file.
        sample_weight: with arrays, the weight of each training sample in losses and metrics: of a batch
            sum(weight * loss) / sum(weight). Of a table it is a column: `data_options={"weight": "column"}`.
        augment: names with commas, a function, or a list of both: random changes of the training samples, by
            functions (inputs, targets, random) -> (inputs, targets) of whole batches.
        callbacks: objects that observe the run, and may end it: `tutti.Callback`, or their names. Each rank
            has copies of them; afterwards the given ones have the attributes of rank 0's.
        quiet: print nothing.
        trace: write a time line of every rank into the run folder, as `tutti train --trace` does; needs
            `out`.
        resume: the folder of an earlier run to resume, or of one of its checkpoints. Arguments left out are
            as they were. Model, data and other objects must be given again, and options that affect what is
            learned must not differ. "auto": the run in `out`, or a new one there. For a finished run, return
            its result.
        **options: target, the column or columns of a table to predict; and the other fields of `TrainConfig`,
            such as epochs=5, batch_size=64 (samples behind one weight update, over all ranks together),
            lr=0.1 or lr="auto", model_options={"hidden": [64]}. A run folder is written if `out` names one.

    Returns:
        The trained model, the history and the summary. A given module is itself trained: it gets rank 0's
        weights and buffers, and keeps its dtype. Another model has the trained dtype: float64 with
        precision="fp64".

    Raises:
        UserError: an argument is wrong; the message names it and the remedy.
        RankFailed: a rank raised an exception, whose traceback is in the message.
        PeerLost: a rank was killed.
        RunStopped: the run was asked to stop, or its time limit is over; it can be resumed.

    Example:
        >>> result = tutti.train("lenet", "mnist", workers=2, epochs=5, schedule="one_cycle", lr=0.003)
        >>> print(result.summary.test)
    """
    given = {"model": model, "data": data, "strategy": strategy, "workers": workers, "optimizer": optimizer}
    given |= {"schedule": schedule, "loss": loss, "metrics": metrics, "sampling": sampling}
    given |= {"augment": augment, "callbacks": callbacks}
    _refuse_wrong(given, options)
    watchers = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    given["callbacks"] = watchers or None
    given["data"] = without_loaders(data, options, quiet)
    if sample_weight is not None:
        given["data"] = with_weights(given["data"], sample_weight)
    job, outcome = _job(given, options, quiet, None if resume is None else str(resume))
    if outcome is None:
        with lasting_output():
            outcome = cast("RunOutcome | None", run(replace(job, trace=trace)))
    if outcome is None:
        raise BadOption(
            "rank 0 ran on a host that shares no files with this one; use out=... and read the folder there"
        )
    folder = Path(outcome.folder) if outcome.folder else None
    if outcome.summary is None:
        raise RunStopped(f"the run was stopped: {outcome.stopped}; continue it by resume={str(folder)!r}")
    trained = _trained_model(model, job, outcome)
    own = [one for one in watchers if isinstance(one, Callback)]
    for callback, noted in zip(own, outcome.callbacks, strict=False):
        vars(callback).update({} if noted is None else cloudpickle.loads(noted))
    return Result(trained, outcome.history, outcome.summary, outcome.config, folder, outcome.data)


def _job(
    given: dict[str, object], options: TrainOptions, quiet: bool, resume: str | None
) -> tuple[TrainJob, RunOutcome | None]:
    """Return the job for some arguments, and its outcome if it is a finished run."""
    # A resumed run keeps its earlier value of an argument that is left at its default.
    left = [name for name, one in given.items() if one is None or (isinstance(one, str) and one == "auto")]
    chosen, objects = by_name({name: one for name, one in given.items() if name not in (*left, "workers")})
    if "workers" not in left:
        chosen["workers"] = str(given["workers"])
    spell(options)
    chosen |= options
    config = TrainConfig.from_json(with_defaults(chosen))
    found = None if resume is None else Resume.find(resume, config.out)
    outcome = None
    if found is not None:
        before = TrainConfig.read(found.folder, trust=True)
        config = replace(placed(before, chosen).changed(chosen), out=str(found.folder))
        if found.goes_on:
            config = going_on(before, config)
            outcome = outcome_again(found, config, quiet)
        if outcome is not None:
            outcome = replace(outcome, weights=read_weights(RunFolder(Path(str(outcome.folder))).weights))
    job = TrainJob(
        config,
        objects=objects,
        quiet=quiet,
        write=config.out is not None,
        bring_weights=True,
        notebook=_in_notebook(),
        resume=found,
    )
    return job, outcome


def _refuse_wrong(given: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Refuse unknown arguments, and values of the wrong kind."""
    known = [*inspect.signature(train).parameters, *TrainOptions.__annotations__]
    known.remove("options")
    refuse_unknown(options, known, "train")
    for name in ("model", "data"):
        if given[name] is None:
            raise BadOption(f"the {name} is None; help(tutti.train) says what it may be")
    if not (isinstance(given["model"], str | Path) or callable(given["model"])):
        kind = type(given["model"]).__name__
        raise BadOption(f"the model is a {kind}; the model comes first: tutti.train('tabular', data, ...)")
    refuse_built(given["optimizer"])
    several = cast("Sequence[object]", given["callbacks"])
    for one in several if isinstance(several, list | tuple) else [several]:
        refuse_other(one, Callback | str, "callback", "one of a class derived from tutti.Callback")
    for name in ("optimizer", "schedule", "loss", "metrics"):
        value = given[name]
        for one in value if name == "metrics" and isinstance(value, list | tuple) else [value]:
            if not (one is None or isinstance(one, str) or callable(one)):
                raise BadOption(f"{name} is {one!r}; give a name or a function, as help(tutti.train) says")


def refuse_unknown(options: Iterable[str], known: Collection[str], function: str) -> None:
    """Refuse arguments that a function of the package does not have."""
    for name in options:
        of_data = name.removesuffix("_by")
        if name not in known and of_data in (*OF_ALL, *TABLE_OPTIONS):
            raise BadOption(f"unknown argument '{name}'; give data_options={{'{of_data}': ...}}")
        if name in known:
            continue
        see = f"See help(tutti.{function})."
        stems = ((flag, *flag.strip("-").replace("-", "_").split(".")) for flag in synonyms(name))
        if meant := [flag for flag, field, *key in stems if field + "_options" * len(key) in known]:
            raise BadOption(f"unknown argument '{name}'; did you mean {or_listed(meant)}? {see}")
        raise UnknownName("argument", name, known, see)


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose cell shows the ranks' output."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def without_loaders(data: object, options: TrainOptions, quiet: bool) -> object:
    """Return the data sets of DataLoaders, whose batch size becomes an option unless one is given."""
    pair = isinstance(data, tuple | list)
    given: Any = data if pair else [data]
    loaders = {at: unloaded(one) for at, one in enumerate(given) if isinstance(one, DataLoader)}
    if not loaders:
        return data
    _, batch_size, used = next(iter(loaders.values()))
    options.setdefault("batch_size", batch_size)
    if not quiet:
        print(used, flush=True)
    datasets = [loaders[at][0] if at in loaders else one for at, one in enumerate(given)]
    return tuple(datasets) if pair else datasets[0]


def spell(options: TrainOptions) -> None:
    """Write class weights and the target as a configuration has them."""
    weights = options.get("class_weights")
    if weights is not None and not isinstance(weights, str):
        options["class_weights"] = ",".join(map(str, np.asarray(weights).tolist()))
    target = options.pop("target", None)
    if target is not None:
        named = target if isinstance(target, str | int) else list(target)
        options["data_options"] = {**options.get("data_options", {}), "target": named}


def weights_of(sampling: object) -> object:
    """Return the weights of samples as an array; a name or a path unchanged."""
    given = sampling is None or isinstance(sampling, str | PathLike)
    return sampling if given else np.asarray(sampling, dtype=np.float64)


def refuse_built(optimizer: object) -> None:
    """Refuse an optimizer over the parameters of a module, as ranks train copies of the module."""
    if isinstance(optimizer, Optimizer):
        raise BadOption(
            f"the optimizer is an {type(optimizer).__name__} over the parameters of a module, and each rank "
            "trains its own model; give its class, or a function of the parameters"
        )


def _trained_model(model: object, recipe: Recipe, outcome: RunOutcome) -> nn.Module:
    """Return the caller's module, or a new one, with the trained weights."""
    config = recipe.config
    if isinstance(model, nn.Module):
        built = model
    else:
        with ONE_AT_A_TIME, seeded(config.seed):
            data, options = outcome.data, config.model_options
            built = models.build(recipe.given("model"), data.of_inputs, data.outputs, options, data.table)
        if outcome.config.precision == "fp64":
            built = Arithmetic("fp64").prepare(built)
    assert outcome.weights is not None
    bring_back(outcome.weights, built)
    return built
