"""The configuration of a training run: the command line, `tutti.train` and `config.json` all come from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import Field, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final

from tutti.data.tables import OF_ALL, TABLE_OPTIONS
from tutti.errors import BadOption, UnknownName
from tutti.model_parallel.layout import WAYS, options_of
from tutti.models import MODELS
from tutti.parts import AUGMENTATIONS, DATA_SETS, FORMATS, LOSSES, METRICS, OPTIMIZERS, SCHEDULES, STRATEGIES
from tutti.records import pipeline
from tutti.records.run_folder import CONFIG
from tutti.registry import Registry
from tutti.run.trust import check as check_trust
from tutti.training.intervals import AUTO, OFF, Averaging, Every, seconds_of
from tutti.training.loggers import optional_loggers

Options = dict[str, Any]
"""Further options by name, each an int, a float, a bool, a string, None, or a list of these."""

Rate = float | str
"""A learning rate, or `AUTO`: a range test picks it."""

Goal = float | str
"""A figure to reach: a number, or the name of a figure and a number."""

OBJECT: Final = "object:"
"""Begins the name of a model, data set, ... that was given as a Python object that no name can bring back."""

DEFAULT_EPOCHS: Final = 20
"""Passes over the training samples, when neither epochs nor steps is given."""

STOP: Final = "stop"
SHRINK: Final = "shrink"
"""Values of --on-failure: a loss ends the run, or fewer ranks continue."""

MOST_RANKS: Final = 1 << 16
"""The most ranks of a run, and the most threads of a rank."""

_REMEDY: Final = "give the folder of a run, or its config.json"

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "Rate": ((int, float, str), "a number, or auto"),
    "Goal": ((int, float, str), "a number, or a figure and a number, such as 'accuracy 0.97'"),
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
    "Options": ((dict,), "a table of names and values"),
}


_SYNONYMS: Final = {
    "--data": "dataset input inputs train-data data-dir data-path data-set train-file training-data",
    "--data.target": "target label label-column target-column labels-name y",
    "--data.features": "features features-name",
    "--data.labels": "labels",
    "--data.stream": "stream streaming",
    "--data.columns": "columns input-columns feature-columns",
    "--data.prepare": "normalize normalise normalization standardize standardise scaler rescale",
    "--validation": "validation-split val-split val-size val-fraction validation-fraction val",
    "--test": "test-size test-split test-fraction",
    "--group-by": "groups group",
    "--weights": "pretrained init-weights load load-weights model-weights",
    "--epochs": "num-epochs n-epochs max-epochs nb-epochs num-train-epochs nepochs",
    "--steps": "max-steps num-steps iterations max-iter max-iters updates",
    "--goal": "target target-metric target-accuracy target-loss threshold stop-at",
    "--patience": "early-stopping early-stopping-patience early-stop n-iter-no-change",
    "--monitor": "early-stopping metric-for-best-model monitor-metric",
    "--restore-best": "restore-best-weights load-best-model-at-end save-best-only",
    "--time-limit": "max-time timeout walltime time",
    "--batch-size": "batch bs minibatch mini-batch-size train-batch-size per-device-train-batch-size",
    "--accumulate": "gradient-accumulation-steps accumulate-grad-batches grad-accum accumulation",
    "--optimizer": "optim solver master-optimizer worker-optimizer",
    "--optimizer.momentum": "momentum",
    "--optimizer.weight-decay": "weight-decay wd l2 decay",
    "--optimizer.betas": "betas beta1 beta2",
    "--lr": "learning-rate base-lr initial-lr eta alpha step-size lrate",
    "--schedule": "scheduler lr-scheduler lr-schedule lr-scheduler-type warmup warmup-steps lr-decay",
    "--loss": "criterion loss-function loss-fn objective",
    "--class-weights": "class-weight pos-weight",
    "--clip-norm": "grad-clip gradient-clip-val max-grad-norm clip-grad gradient-clipping clip clipnorm",
    "--seed": "random-state random-seed seed-everything",
    "--workers": "np nproc nprocs nproc-per-node num-processes n-processes processes procs ranks world-size "
    "jobs n-jobs num-workers max-gpus ntasks",
    "--hosts": "host hostfile machinefile nodes nnodes num-nodes",
    "--threads": "num-threads omp-num-threads cpus cores cpus-per-task intra-op-threads",
    "--strategy": "mode algorithm algo ddp distributed distribution parallelism easgd downpour",
    "--strategy.every": "sync-every sync-period communication-period",
    "--device": "gpus gpu cuda accelerator use-cuda use-gpu devices master-gpu",
    "--precision": "fp16 bf16 amp mixed-precision half dtype use-amp",
    "--on-failure": "max-restarts elastic restarts",
    "--out": "output output-dir outdir save-dir log-dir logdir work-dir workdir results-dir checkpoint-dir "
    "trial-name default-root-dir save-path",
    "--checkpoint": "save-every save-steps save-freq checkpoint-interval checkpoint-every save-strategy",
    "--keep": "save-total-limit keep-last save-top-k",
    "--resume": "restart restore continue resume-from-checkpoint ckpt-path from-checkpoint load-checkpoint",
    "--log": "logger tensorboard mlflow report-to wandb",
    "--trace": "profile profiler timeline",
    "cuda": "gpu",
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp32": "float32 float single",
    "fp64": "float64 double",
}
"""Names that people know from other programs, by the option, or the value of one, that is the same here."""


def synonyms(name: str) -> list[str]:
    """Return the options and values that other programs call `name`, with or without dashes."""
    word = name.lower().replace("_", "-").lstrip("-")
    return [flag for flag, words in _SYNONYMS.items() if word in words.split()]


def or_listed(flags: Sequence[str]) -> str:
    """Return options as text: "'--data.target' or '--goal'"."""
    return " or ".join(f"'{one}'" for one in flags)


def option(
    default: Any,
    help: str | Callable[[], str],
    choices: tuple[str, ...] = (),
    *,
    least: float = -math.inf,
    most: float = math.inf,
) -> Any:
    """Declare a field that is an option of the command line."""
    about = {"help": help, "choices": choices, "least": least, "most": most}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def help_of(option: Field[Any]) -> str:
    """Return the help text of a field."""
    help = option.metadata["help"]
    return str(help() if callable(help) else help)


PARTS: Final[Mapping[str, Registry[Any]]] = {
    "model": MODELS,
    "data": DATA_SETS,
    "augment": AUGMENTATIONS,
    "strategy": STRATEGIES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "loss": LOSSES,
    "metrics": METRICS,
}
"""The built-in parts and torch's, by the field that may name one."""


def _options_of(parts: Registry[Any]) -> str:
    """List the options of parts; parts with the same options share an entry."""
    alike: dict[str, list[str]] = {}
    for name in parts:
        alike.setdefault(", ".join(parts.options(name)), []).append(name)
    return "; ".join(f"of {', '.join(names)}: {options}" for options, names in alike.items() if options)


def _options_of_ways() -> str:
    options = {way: " and ".join(options_of(way)) for way in WAYS}
    of_ways = "; ".join(f"of {way}: {names}" for way, names in options.items() if names)
    return f"{of_ways}. Schedules are {', '.join(pipeline.SCHEDULES)}"


@dataclass(frozen=True)
class TrainConfig:
    """A training run, complete: the same configuration gives the same run.

    Every field is an option of `tutti train` of the same name, and an argument of `tutti.train`.
    A field of type `Options` takes `--NAME.KEY value` on the command line.
    """

    model: str = option(
        "cnn", "built-in model, package.module:factory, file.py:factory, or a file with a whole model"
    )
    model_options: Options = option(
        {},
        lambda: (
            f"options of the model, such as --model.hidden 256,128 of mlp\n{_options_of(MODELS)}; or the "
            "arguments of a factory"
        ),
    )
    weights: str | None = option(
        None, "weights to begin with: a run folder, a checkpoint, or a file that 'tutti export' reads"
    )
    data: str = option(
        "digits",
        f"built-in data set ({', '.join(DATA_SETS)}), path ({', '.join(FORMATS)}), package.module:factory "
        "or file.py:factory",
    )
    data_options: Options = option(
        {},
        "options of the data, such as --data.target COLUMN of a table\nof all data: "
        f"{', '.join(OF_ALL)}; of tables: {', '.join(TABLE_OPTIONS)}; of HDF5: features, labels, group, "
        "weight; of pictures: size; of folders of NPY files: stream, buffer; or the arguments of a factory",
    )
    augment: str | None = option(
        None,
        f"random changes of the training samples, comma-separated: {', '.join(AUGMENTATIONS)}, "
        "file.py:function or package.module:function",
    )
    augment_options: Options = option(
        {}, lambda: f"the number that belongs to one: {_options_of(AUGMENTATIONS)}"
    )
    validation: float = option(0.1, "share of the training samples kept for validation, below 1", least=0)
    test: float = option(
        0.0, "share of the samples kept for a test at the end, before the validation part is taken", least=0
    )
    split: str | None = option(
        None, "one of the splits in a file, such as splits.npz:0; what it holds out is the validation part"
    )
    predictions: bool = option(
        False, "write the outputs for each sample of the validation part to predictions.npz in the run folder"
    )
    validate: str = option(
        "pause",
        "when to validate; pause: all ranks stop and evaluate; background: a process beside each rank does",
        ("pause", "background"),
    )
    strategy: str = option(
        "auto",
        f"way to train in parallel: {', '.join(STRATEGIES)}, or file.py:Class, package.module:Class; "
        "auto is solo for one worker, else sync; '--strategy NAME --help' explains the options of one",
    )
    strategy_options: Options = option({}, "hyper-parameters of the strategy")
    parallel: str | None = option(
        None,
        f"hold one model on several ranks: {', '.join(WAYS)}; with =N on N ranks, and data=N for N such "
        "teams: data=2,tensor=2",
    )
    parallel_options: Options = option({}, _options_of_ways)
    workers: str = option("auto", "how many ranks to train on, or auto: one for each allowed core")
    hosts: str | None = option(
        None,
        "hosts and their ranks, 'a:4,b:4', the path of a host file, or slurm: the nodes of Slurm's "
        "allocation; starts mpirun. With a smaller -n the last ones stand by",
    )
    servers: int = option(
        0,
        "ranks beside the workers that keep the parameter centre, if there is one",
        least=0,
        most=MOST_RANKS,
    )
    levels: int = option(1, "2: each host has a parameter centre beside the servers'", least=1, most=2)
    server_period: int | None = option(
        None, "exchanges of a host's centre with its workers before one with the servers; 10", least=1
    )
    balance: str = option(
        "none",
        "for workers of unequal speed: split each batch by speed, or let them take batches from a queue",
        ("none", "speed", "queue"),
    )
    threads: int | None = option(
        None, "threads of each rank; by default the allowed cores / the ranks", least=1, most=MOST_RANKS
    )
    epochs: int | None = option(
        None, "passes over the training samples; 20 when neither epochs nor steps is given", least=1
    )
    steps: int | None = option(None, "weight updates (of each worker), instead of epochs", least=1)
    monitor: str | None = option(
        None,
        "figure that decides which epoch is the best: 'validation loss', the default, 'training accuracy' "
        "and so on, also as val_loss",
    )
    patience: int | None = option(
        None, "end after this number of epochs in a row without a better --monitor", least=1
    )
    goal: Goal | None = option(
        None, "end when a figure is at least as good, such as 'accuracy 0.97'; a number alone: of --monitor"
    )
    restore_best: bool = option(False, "end with the weights of the best epoch, by --monitor")
    average: str | None = option(
        None, "evaluate and keep an average of the weights: ema:0.999, a decay; swa:0.75, from there on"
    )
    time_limit: str | None = option(None, "save and stop after this time, such as 3h50m; see --resume")
    batch_size: int = option(
        32, "samples behind one weight update, over all workers that make it together", least=1
    )
    accumulate: int = option(
        1, "passes in which a worker computes its part of an update, which takes less memory", least=1
    )
    optimizer: str = option(
        "adam", "any optimizer of torch.optim by name, such as sgd, adamw, or lars, lamb, muon"
    )
    optimizer_options: Options = option(
        {}, "arguments of the optimizer, such as momentum, weight-decay or betas"
    )
    lr: Rate | None = option(
        None,
        "learning rate; by default the optimizer's own; auto: picked by a range test, which takes at most "
        "5 % of the run's updates and is then undone",
    )
    schedule: str | None = option(
        None,
        "any scheduler of torch.optim.lr_scheduler, such as OneCycleLR, stepped each update; plateau, "
        "stepped each epoch; or warmup_cosine, cosine, warm or linear, which last as long as the run; none",
    )
    schedule_options: Options = option({}, "arguments of the scheduler")
    sampling: str | None = option(
        None,
        "draw samples with replacement: balanced, each class equally often, or by weights in an NPY file",
    )
    loss: str = option(
        "auto", f"{', '.join(LOSSES)}, file.py:function or package.module:function; auto follows the targets"
    )
    loss_options: Options = option(
        {}, lambda: f"options of the loss: {_options_of(LOSSES)}; or arguments of a function or class"
    )
    class_weights: str | None = option(
        None,
        "weights of the classes in the loss: balanced, by their counts in the training part, or w0,w1,...",
    )
    metrics: str = option(
        "auto",
        f"comma-separated: {', '.join(METRICS)}, topK for any K, file.py:function or "
        "package.module:function, also of sklearn.metrics; auto follows the loss",
    )
    clip_norm: float | None = option(None, "largest 2-norm of the gradient of the whole model")
    clip_value: float | None = option(None, "largest absolute value of an element of the gradient")
    batch_norm: str = option(
        "sync",
        "statistics of BatchNorm in training: of the whole batch of an update (sync), or of each rank's part",
        ("sync", "local"),
    )
    precision: str = option("fp32", "arithmetic of forward and backward", ("fp32", "bf16", "fp16", "fp64"))
    layout: str = option(
        "contiguous",
        "memory format of 4-d tensors; batch_last: fast kernels for small models, made by your C compiler",
        ("contiguous", "channels_last", "batch_last"),
    )
    device: str = option("cpu", "where to compute; cuda is for one worker", ("cpu", "cuda"))
    cuda_graph: str = option(
        "auto",
        "record a step on a GPU once, and replay it: auto for models of torch's own layers, on for any",
        ("auto", "on", "off"),
    )
    seed: int = option(0, "decides the first weights, the validation part and the order of samples", least=0)
    checkpoint: str = option(
        AUTO,
        "how often the run folder gets a checkpoint, and at the end: 10m, '500 steps', '1 epoch'; auto: "
        "every 10m; off: only when the run is stopped by a signal",
    )
    keep: int = option(3, "how many of the newest checkpoints stay, and the best one beside them", least=1)
    on_failure: str = option(
        "stop",
        "when a rank is lost: end the run (stop), or continue from a copy of the state in memory, with new "
        "ranks (respawn) or with one fewer (shrink)",
        ("stop", "respawn", "shrink"),
    )
    hang_timeout: str = option(
        "60s", "a rank that makes no step for this time, and waits for no other, is lost; or off"
    )
    skip_nonfinite: int = option(
        0,
        "skip up to this number of updates in a row with NaN or inf in a gradient; 0: not looked at",
        least=0,
    )
    callbacks: str | None = option(
        None, "your callbacks, comma-separated: file.py:NAME or package.module:NAME (tutti.Callback)"
    )
    log: str = option(
        "none",
        lambda: (
            f"where the figures of every epoch go besides; comma-separated: {', '.join(optional_loggers())}"
        ),
    )
    out: str | None = option(None, "run folder to write; by default runs/DATE-MODEL-DATA")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, PathLike):
                value = str(value)
                object.__setattr__(self, f.name, value)
            _check_field(f, value)
        for message in _refused(self):
            raise BadOption(message)

    @property
    def rate(self) -> float | None:
        """The learning rate; None: the optimizer's own, or it is still to be picked."""
        return None if isinstance(self.lr, str) else self.lr

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        return deepcopy(vars(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        """Return the configuration that `as_json` gave.

        Raises:
            UnknownName: a key that is no option.
            BadOption: a value that cannot be used.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownName("option", key, known)
        return cls(**values)

    def changed(self, given: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration with some fields replaced.

        Options of a part go with it: another strategy begins with its own defaults. Given epochs replace
        steps, and steps replace epochs.

        Args:
            given: new values by field; the options of a part after the part.

        Raises:
            UnknownName: a key that is no option.
            BadOption: a value that cannot be used.
        """
        values = self.as_json()
        for name, other in (("epochs", "steps"), ("steps", "epochs")):
            if given.get(name) is not None and other not in given:
                values[other] = None
        for name, value in given.items():
            part = f"{name}_options"
            if part in values and values.get(name) != value:
                values[part] = {}
            values[name] = value
        return self.from_json(values)

    @classmethod
    def read(cls, path: str | Path, trust: bool = False, replaced: Collection[str] = ()) -> TrainConfig:
        """Return the configuration in a JSON file, such as the `config.json` of a run folder.

        Args:
            path: of the file, or of the folder of a run.
            trust: whether it may name code, which runs when the configuration is used.
            replaced: fields that will be replaced.

        Raises:
            BadOption: the file cannot be read, or is no JSON table.
            Untrusted: it names code, and `trust` is False.
        """
        path = Path(path, CONFIG) if Path(path).is_dir() else Path(path)
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}, not a table of options")
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise BadOption(f"cannot read the configuration '{path}': {why}; {_REMEDY}") from error
        config = cls.from_json(values)
        if not trust:
            check_trust(path, values, replaced)
        return config


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options, completed by the `DEFAULTS` in the file of a built-in model.

    The model's learning rate belongs to its own optimizer, and its epochs do not apply if steps are given.
    """
    model = given.get("model", TrainConfig.model)
    of_model = MODELS.literal(model, "DEFAULTS") or {} if model in MODELS else {}
    related = {"optimizer": ("lr", "optimizer_options"), "steps": ("epochs",)}
    chosen = {*given, *(other for name in given for other in related.get(name, ()))}
    return {**{name: one for name, one in of_model.items() if name not in chosen}, **given}


OF_LONG_RUNS: Final = (
    *("weights", "monitor", "patience", "goal", "restore_best", "time_limit", "checkpoint", "keep"),
    *("average", "predictions", "on_failure", "hang_timeout", "skip_nonfinite"),
)
"""The options of complete runs, which measurements of some steps do not have."""


def flag(name: str) -> str:
    """Return a field as the command line spells it: batch_size is --batch-size."""
    return "--" + name.replace("_", "-")


def split_of(text: str) -> tuple[str, int]:
    """Return the file and the number of a split."""
    file, colon, number = text.rpartition(":")
    if not (file and colon and number.isdecimal()):
        raise BadOption(f"--split is '{text}'; give a file of splits and the number of one: splits.npz:0")
    return file, int(number)


def type_name(of: Field[Any]) -> str:
    """Return a field's type apart from None: int, float, str, bool or Options."""
    return str(of.type).removesuffix(" | None")


_TOGETHER: Final = (
    ("epochs", "steps", "both say how long the run is"),
    ("split", "validation", "both say which samples are held out"),
    ("split", "test", "both say which samples are held out"),
    ("parallel", "servers", "servers keep the centre of whole models"),
    ("parallel", "balance", "it is for ranks with whole models"),
    ("parallel", "skip_nonfinite", "its ranks hold one model together"),
    ("parallel", "average", "its ranks hold one model together"),
    ("parallel", "device=cuda", "it computes on the CPU"),
    ("parallel", "on_failure=shrink", "it needs all of its ranks; use --on-failure respawn"),
    ("parallel", "layout=batch_last", "that is for ranks with whole models"),
    ("parallel", "precision=fp16", "that scales the loss by the gradient of the whole model; use bf16"),
    ("lr=auto", "parallel", "it tests whole models"),
    ("lr=auto", "precision=fp16", "the scale of the loss leaves out the first steps; use --precision bf16"),
    ("precision=fp16", "skip_nonfinite", "the scale of the loss leaves out steps itself"),
    ("device=cuda", "skip_nonfinite", "each look at a gradient would wait for the GPU"),
    ("device=cuda", "validate=background", "that evaluates on the CPU; use --validate pause"),
    ("device=cuda", "layout=batch_last", "its kernels are for the CPU"),
    ("precision=fp16", "layout=batch_last", "its kernels compute in fp32 or fp64"),
    ("precision=bf16", "layout=batch_last", "its kernels compute in fp32 or fp64"),
    ("device=cpu", "cuda_graph=on", "a graph is for samples that lie on a GPU; use --device cuda"),
)
"""Options that do not go together, and why; NAME=VALUE is one value of an option."""

_NEEDED: Final = (
    ("levels=2", "servers", "they are the upper level, such as --servers 1"),
    ("server_period", "levels=2", "it is for two levels of centres"),
    ("augment_options", "augment", "name what changes the samples, such as --augment crop"),
    ("parallel_options", "parallel", "name a way, such as --parallel pipeline"),
    ("schedule_options", "schedule", "name one, such as --schedule cosine"),
)
"""Options that need another one, and why."""


def _given(config: TrainConfig, row: str) -> str:
    """Return an option of a table as the command line has it; empty if it has its default."""
    name, _, wanted = row.partition("=")
    value = getattr(config, name)
    if (wanted and str(value) != wanted) or (not wanted and value == getattr(TrainConfig, name, {})):
        return ""
    if isinstance(value, dict):
        return f"{flag(name).removesuffix('-options')}.{next(iter(value))}"
    return f"{flag(name)} {value}"


def _refused(config: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with a configuration under any strategy."""
    for one, other, why in _TOGETHER:
        if (first := _given(config, one)) and (second := _given(config, other)):
            yield f"{first} does not go with {second}: {why}; leave one of them out"
    for one, other, why in _NEEDED:
        if (first := _given(config, one)) and not _given(config, other):
            yield f"{first} needs {flag(other.partition('=')[0])}: {why}; or leave it out"
    if config.split is not None:
        split_of(config.split)
    if config.average is not None:
        Averaging.parse(config.average)
    if config.time_limit is not None:
        seconds_of(config.time_limit, "--time-limit")
    if config.hang_timeout != OFF:
        seconds_of(config.hang_timeout, "--hang-timeout", or_else=OFF)
    Every.parse(config.checkpoint, "--checkpoint")
    count = config.workers[:20]
    if count != AUTO and not (count.isdecimal() and 1 <= int(count) <= MOST_RANKS):
        yield f"--workers is '{count}'; give a whole number from 1 to {MOST_RANKS}, or auto"
    for name in ("validation", "test"):
        if getattr(config, name) >= 1:
            yield f"--{name} is {getattr(config, name)}; give a share of at least 0 and below 1, such as 0.1"
    for name in ("lr", "clip_norm", "clip_value"):
        value = getattr(config, name)
        if isinstance(value, str):
            if value != AUTO:
                yield f"{flag(name)} is '{value}'; give a number, or auto"
        elif value is not None and not 0 < value < math.inf:
            yield f"{flag(name)} is {value}; give a finite number above 0"


def _check_field(f: Field[Any], value: Any) -> None:
    """Refuse a value of another type than the field's, or outside its choices."""
    name, about = flag(f.name), f.metadata
    if value is None and str(f.type).endswith("| None"):
        return
    types, words = _TYPES[type_name(f)]
    if not isinstance(value, types) or isinstance(value, bool) is not (types == (bool,)):
        example = f", such as {f.default!r}" if isinstance(f.default, str) else ""
        raise BadOption(f"{name} is {value!r}; give {words}{example}")
    for key, item in value.items() if isinstance(value, dict) else ():
        items = item if isinstance(item, list | tuple) else [item]
        if not all(one is None or isinstance(one, bool | int | float | str) for one in items):
            raise BadOption(
                f"{name.removesuffix('-options')}.{key} is {item!r}; give a number, a text, true, false, "
                "null, or a list of these"
            )
    if about["choices"] and value not in about["choices"]:
        if meant := [one for one in synonyms(str(value)) if one in about["choices"]]:
            raise BadOption(f"unknown value '{value}' of {name}; did you mean {or_listed(meant)}?")
        raise UnknownName("value", str(value), about["choices"], of=name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < about["least"]:
            raise BadOption(f"{name} is {value}; the smallest possible is {about['least']}")
        if value > about["most"]:
            raise BadOption(f"{name} is {value}; the largest possible is {about['most']}")
