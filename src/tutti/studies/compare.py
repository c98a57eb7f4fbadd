"""The same training in several ways, which take turns.

    repeat 0   solo, 1 thread │ solo, all threads │ sync, 2 workers │ easgd, 2 workers
    repeat 1   solo, 1 thread │ solo, all threads │ sync, 2 workers │ easgd, 2 workers    with the next seed

Combinations take turns, so other load on the machine slows all of them alike. Each run has its own processes
and its own run folder. A run that fails leaves its error there, and the others still run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tutti.data import BUILT_IN
from tutti.errors import BadOption, RunStopped, TuttiError, UnknownName, in_one_line
from tutti.launch.cores import allowed_cores
from tutti.model_parallel.layout import Layout, options_of, parse_layout, ranks_of
from tutti.records.comparison import CPU, LAYOUT, STRONG, WEAK, Combination, Comparison, ComparisonFolder
from tutti.records.run import Summary
from tutti.records.run_folder import RunFolder
from tutti.run import summary_lines
from tutti.run.checks import check_recipe
from tutti.run.config import TrainConfig
from tutti.run.start import run
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.strategies import named
from tutti.strategies.base import Pace
from tutti.studies.crossing import crossed, refuse_launcher, with_options

CROSSED: Final = {
    "strategy": "--strategies",
    "parallel": "--parallel",
    "workers": "--workers",
    "threads": "--workers",
    "device": "--devices",
}
"""Fields of a run's configuration that the comparison's own options decide."""


@dataclass(frozen=True)
class Question:
    """The question of a comparison. An option of a part has a name such as "strategy.every"."""

    config: TrainConfig  # shared by all combinations
    strategies: Sequence[str]
    workers: Sequence[int]  # numbers of ranks, for all strategies but solo
    scalings: Sequence[str] = (STRONG,)  # of `tutti.records.comparison.SCALINGS`
    repeats: int = 3  # of each combination
    goal: float | None = None  # an accuracy on the validation part, in [0, 1]: the time to it is measured
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # further options and their values
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # for one strategy or layout alone
    devices: Sequence[str] = (CPU,)
    layouts: Sequence[str] = ()  # of the model, on the numbers of ranks that they name, or on all `workers`

    def __post_init__(self) -> None:
        for name in ("strategies", "workers", "devices"):
            if not getattr(self, name):
                raise BadOption(f"nothing to compare; give --{name} at least one value")
        if self.repeats < 1:
            raise BadOption(f"--repeats is {self.repeats}; the smallest possible is 1")
        if min(self.workers) < 1:
            raise BadOption(f"--workers has {min(self.workers)}; the smallest possible is 1")
        if self.goal is not None and not self.config.validation:
            raise BadOption("--goal is reached on the validation part; give --validation a share above 0")
        metrics = self.config.metrics
        if self.goal is not None and {"auto", "accuracy"}.isdisjoint(map(str.strip, metrics.split(","))):
            raise BadOption(f"--goal is an accuracy, but accuracy is not among --metrics {metrics}")
        for name in CROSSED.keys() & self.sweep.keys():
            raise BadOption(f"--sweep {name} is not needed; give {CROSSED[name]} instead")
        for name in self.own:
            if name not in (*self.strategies, *self.layouts):
                layouts = f", nor a --parallel {' or '.join(self.layouts)}" if self.layouts else ""
                raise BadOption(
                    f"--for {name}: '{name}' is not among --strategies {','.join(self.strategies)}{layouts}"
                )
        self._check_layouts()

    def _check_layouts(self) -> None:
        if self.layouts and set(self.devices) != {CPU}:
            raise BadOption(f"--parallel computes on the CPU, not on --devices {','.join(self.devices)}")
        known = list(dict.fromkeys(name for text in self.layouts for name in options_of(text)))
        for key in self.layout_options:
            if not self.layouts:
                raise BadOption(f"{LAYOUT}.{key} is given, but no --parallel; name one, such as pipeline")
            if key not in known:
                raise UnknownName("option", key, known, of=f"--parallel {' or '.join(self.layouts)}")

    @property
    def layout_options(self) -> dict[str, Sequence[Any]]:
        """The swept options of layouts, such as schedule; a layout without the option leaves it out."""
        parts = {key.partition("."): values for key, values in self.sweep.items()}
        return {key: values for (part, _, key), values in parts.items() if part == LAYOUT}


def plan_comparison(question: Question, cores: int | None = None) -> Comparison:
    """Return the combinations that answer the question, on `cores` or all usable cores.

    Raises:
        UserError: a strategy or an option is unknown or has an unusable value, or a built-in data set cannot
            be downloaded.
    """
    refuse_launcher("a comparison")
    cores = cores or allowed_cores().usable
    combinations: dict[str, Combination] = {}
    for one in _combinations(question, cores):
        # A combination that a device cannot run fails alone, later: the others are still compared.
        job = TrainJob(replace(config_of(question, one, 0), device=CPU, cuda_graph="auto"))
        check_recipe(job, one.workers)
        combinations[one.folder] = one
    config, ways = question.config, tuple(combinations.values())
    if config.data in BUILT_IN:
        BUILT_IN[config.data]()  # A download that fails is reported once, not by every run.
    return Comparison(config.model, config.data, question.repeats, question.goal, ways, config.as_json())


def _combinations(question: Question, cores: int) -> Iterator[Combination]:
    layouts = list(_layouts(question))
    most = max([*question.workers, *(layout.ranks for _, layout, _ in layouts)])
    sweep = {key: values for key, values in question.sweep.items() if key.partition(".")[0] != LAYOUT}
    kinds = itertools.product(question.scalings, crossed(sweep), question.devices)
    for scaling, swept, device in kinds:
        for strategy in question.strategies:
            for workers, threads in _shapes(strategy, question.workers, cores, most, device):
                place = Combination("", "", strategy, workers, threads, scaling, {**swept}, swept, device)
                yield _named(question, place, strategy)
        for text, layout, own in layouts:
            options, threads = swept | own, max(1, cores // most)
            place = Combination("", "", "auto", layout.ranks, threads, scaling, options, swept)
            yield _named(question, replace(place, parallel=layout.describe()), text)


def _layouts(question: Question) -> Iterator[tuple[str, Layout, dict[str, Any]]]:
    """Yield each layout as given, parsed for each number of ranks, and with its swept options."""
    for text in question.layouts:
        known, fixed = options_of(text), ranks_of(text)
        own = {key: values for key, values in question.layout_options.items() if key in known}
        # One rank has nothing to share.
        several = [count for count in question.workers if count > 1] or question.workers
        for ranks in several if fixed is None else [fixed]:
            for options in crossed(own):
                named = {f"{LAYOUT}.{key}": value for key, value in options.items()}
                yield text, parse_layout(text, options, ranks), named


def config_of(question: Question, one: Combination, repeat: int) -> TrainConfig:
    """Return the configuration of one run."""
    values = question.config.as_json()
    values |= {"strategy": one.strategy, "workers": str(one.workers), "threads": one.threads}
    values |= {"device": one.device, "parallel": one.parallel}
    return replace(with_options(values, one.options), seed=question.config.seed + repeat)


def compare(
    question: Question,
    comparison: Comparison,
    folder: Path,
    report: Callable[[str], None],
    train: Callable[[TrainConfig], Summary] | None = None,
) -> None:
    """Make the runs that `folder` does not have yet; report a line before and after each.

    `train` makes one run and returns its summary; by default on new ranks.

    Raises:
        RunStopped: a stop was requested; the interrupted run starts over next time.
    """
    compared = ComparisonFolder(folder)
    left = [
        (repeat, one)
        for repeat, one in itertools.product(range(comparison.repeats), comparison.combinations)
        if not compared.run(one, repeat).finished
    ]
    for number, (repeat, one) in enumerate(left, start=1):
        report(f"{number} of {len(left)}: {one.name}, repeat {repeat + 1}")
        compared.clear(one, repeat)
        try:
            summary = (train or _train)(
                replace(config_of(question, one, repeat), out=str(compared.run(one, repeat).path))
            )
        except RunStopped:
            raise
        except TuttiError as error:
            compared.run(one, repeat).write_error(str(error))
            report(f"  failed: {in_one_line(str(error))}")
        else:
            report(f"  {summary_lines.speed(summary)}")


def _train(config: TrainConfig) -> Summary:
    outcome = run(TrainJob(config, quiet=True, bar=True))
    if isinstance(outcome, RunOutcome) and outcome.stopped is not None:
        raise RunStopped(outcome.stopped)
    assert config.out is not None
    return RunFolder(Path(config.out)).read(Summary)


def _shapes(
    strategy: str, workers: Sequence[int], cores: int, most: int, device: str
) -> Iterator[tuple[int, int]]:
    """Yield numbers of workers and threads: solo with one thread and with all, others with equal threads.

    So twice the workers have twice the cores.
    """
    if strategy != "solo":
        for count in workers:
            yield count, max(1, cores // most)
    elif device == CPU:
        yield from dict.fromkeys([(1, 1), (1, cores)])
    else:
        yield 1, cores


def _named(question: Question, one: Combination, given: str) -> Combination:
    """Name the combination, and add the options for `given` alone and the batch size for its scaling."""
    words = [one.parallel or one.strategy]
    words += [f"{key}={value}" for key, value in one.layout_options.items()]
    if one.parallel is None and one.strategy != "solo":
        words.append(f"{one.workers} worker{'s' if one.workers > 1 else ''}")
    elif one.parallel is None and one.device == CPU:
        words.append(f"{one.threads} thread{'s' if one.threads > 1 else ''}")
    words += [f"{key}={value}" for key, value in one.sweep.items()]
    words += [one.device] if one.device != CPU else []
    words += ["weak"] if len(question.scalings) > 1 and one.scaling == WEAK else []
    name = ", ".join(words)
    folder = "-".join(name.replace(", ", " ").replace(",", "-").replace("=", "-").replace("/", "-").split())
    options = {**one.options, **question.own.get(given, {})}
    one = replace(one, name=name, folder=folder, options=options)
    batch = config_of(question, one, 0).batch_size
    together = one.parallel is not None or named(one.strategy).pace is Pace.TOGETHER
    if one.scaling == WEAK and together:
        options["batch_size"] = batch * one.workers
    elif one.scaling == STRONG and not together:
        # Each worker has its own batch; together they have the samples of one synchronous batch.
        options["batch_size"] = max(1, batch // one.workers)
    return one
