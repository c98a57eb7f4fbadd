"""A run described in lines of text. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tutti.records.pipeline import PipelineRecord
from tutti.records.preparation import DATE, NUMBER, TEXT, Preparation
from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary
from tutti.records.texts import Shape, described, figures, metric_text, plural, printable, ranks_text
from tutti.run.config import TrainConfig

WIDEST_MATRIX = 20
"""The most classes whose confusion matrix fits on a page."""

WIDEST_LABEL = 12

MOST_NAMED = 10
"""The most classes that are named in a line."""


def counts(model: str, parameters: int, data: str, parts: dict[str, int], shape: Shape) -> str:
    """Describe model and data with their sizes, in a line each."""
    samples = ", ".join(f"{count:,} {part}" for part, count in parts.items())
    return f"model {model}: {parameters:,} parameters\ndata {data}: {samples} samples of {described(shape)}"


def kind_of_task(noun: str, count: int, names: Sequence[object]) -> str:
    """Describe what is predicted: a number of classes, of labels of 0 or 1, or of numbers, by their names."""
    plurals = {"class": "classes", "label of 0 or 1": "labels of 0 or 1"}
    of = "regression of " if noun == "number" else ""
    words = f"{of}{count:,} {plurals.get(noun, noun + 's') if count > 1 else noun}"
    if [*map(str, names)] == [*map(str, range(count))]:
        return words
    listed = ", ".join(map(_short, names[:MOST_NAMED])) + (", ..." if len(names) > MOST_NAMED else "")
    return f"{words} ({listed})" if names else words


def task(kind: str, loss: str, metrics: Sequence[str]) -> str:
    """Describe the task in a line."""
    return f"task: {kind}; loss {loss}, {'metrics ' + ', '.join(metrics) if metrics else 'no metrics'}"


def table(preparation: Preparation) -> str:
    """Describe how a table is prepared, in a line."""
    kinds = []
    for kind in (NUMBER, TEXT, DATE):
        some = [column for column in preparation.columns if column.kind == kind]
        flags, embedded = sum(one.inputs.flags for one in some), sum(one.embedded for one in some)
        how = [f"one-hot: {plural(flags, 'column')}"] if flags and kind == TEXT else []
        how += [f"{embedded:,} as category numbers"] if embedded else []
        kinds += [plural(len(some), kind) + (f" ({', '.join(how)})" if how else "")] if some else []
    gaps = sum(column.gaps and bool(column.mean) for column in preparation.columns)
    stands = "mean" if preparation.by_mean else "median"
    parts = [f"table: {', '.join(kinds)}"]
    parts += [f"gaps in {plural(gaps, 'column')} become the {stands}"] if gaps else []
    left_out = [f"{printable(name)} ({why})" for name, why in preparation.left_out.items()]
    more = f", ... ({len(left_out):,} in all)" if len(left_out) > 8 else ""
    return "; ".join([*parts, *([f"left out: {', '.join(left_out[:8])}{more}"] if left_out else [])])


def training(config: TrainConfig, together: bool) -> str:
    """Describe the training in a line."""
    scheduled = config.schedule not in (None, "none")
    schedule = f"schedule {str(config.schedule).removeprefix('object:')}" if scheduled else "no schedule"
    of = "" if together else " of each worker"
    length = plural(config.epochs, "epoch") if config.epochs else plural(config.steps or 0, "step")
    rate = config.lr if isinstance(config.lr, str) else f"{config.lr:g}"
    return (
        f"training: {length} by {config.optimizer.removeprefix('object:')}, learning rate {rate}, "
        f"{schedule}, batch size {config.batch_size:,}{of}"
    )


def own_statistics(config: TrainConfig) -> str:
    """Describe why BatchNorm has each rank's own statistics."""
    way = f"--parallel {config.parallel}" if config.parallel else f"strategy {config.strategy}"
    return f"BatchNorm: each rank has its own statistics, as with {way} ranks do not share whole batches"


def stopped(why: str, step: int | None, way_on: str) -> str:
    """Describe why and where the run has stopped before its end, and how to resume it."""
    after = "" if step is None else f" after step {step:,}"
    return f"stopped{after}, as {why}; continue it by: {way_on}"


def evaluation(what: str, result: Evaluation, labels: Sequence[object] = ()) -> str:
    """Describe an evaluation: count, loss, metrics, and for classes the confusion matrix."""
    metrics = [f"{name} {metric_text(name, value)}" for name, value in result.metrics.items()]
    samples = f"{result.samples:,} samples" + (", weighted" if result.weighted else "")
    head = ", ".join([f"{what}: {samples}", *metrics, f"loss {result.loss:.4g}"])
    if result.confusion is None or len(result.confusion) > WIDEST_MATRIX:
        return head
    names = [_short(labels[k]) if k < len(labels) else str(k) for k in range(len(result.confusion))]
    return head + "\n\n" + "\n".join(_matrix(result, names))


def result(summary: Summary, labels: Sequence[object] = ()) -> list[str]:
    """Describe the result of a run: its figures on the test part, its end and its speed."""
    test = [] if summary.test is None else [f"\n{evaluation('test', summary.test, labels)}\n"]
    return [*test, *ending(summary), speed(summary)]


def ending(summary: Summary) -> list[str]:
    """Describe why a run ended early, and which epoch's weights it has; empty for a full-length run."""
    lines = [] if summary.ended_early is None else [f"ended early: {summary.ended_early}"]
    if summary.restored:
        figures_text = "" if summary.validation is None else f": validation {figures(summary.validation)}"
        lines.append(f"weights: those of epoch {summary.best_epoch}, the best{figures_text}")
    return lines


def speed(summary: Summary) -> str:
    """Describe the speed of the training."""
    ranks = ranks_text(summary.ranks_in_turn or (summary.world.ranks,))
    return (
        f"trained {plural(summary.steps, 'step')} ({_passes(summary)}) on {ranks} in "
        f"{summary.seconds:.1f} s: {summary.samples_per_s:,.0f} samples/s"
    )


def _passes(summary: Summary) -> str:
    """Count the epochs of a run, in words."""
    if summary.complete:
        return plural(summary.epochs, "epoch")
    return (
        f"{plural(summary.epochs - 1, 'epoch')} and part of one" if summary.epochs > 1 else "part of an epoch"
    )


def exchanges(history: Sequence[EpochRecord]) -> list[str]:
    """Describe the staleness of the workers' exchanges, and dropped gradients."""
    lines, ranks = [], [rank for record in history for rank in record.ranks]
    stale = sum((Counter(rank.staleness) for rank in ranks), Counter[int]())
    if max(stale, default=0) > 0:
        lines.append(f"staleness: {_staleness(stale)} updates")
    dropped = sum(rank.dropped for rank in ranks)
    if dropped:
        lines.append(f"dropped: {dropped:,} gradients that came too late")
    return lines


def bubble(record: PipelineRecord) -> str:
    """Describe the idle time of a pipeline's ranks."""
    return f"pipeline {record.schedule}, {record.microbatches} microbatches: {record}"


def _staleness(counts: dict[int, int]) -> str:
    """Return the mean, the 99th percentile and the maximum over all exchanges."""
    all_ = RankRecord(staleness=counts)
    mean, p99, most = all_.staleness_mean, all_.staleness_p99, all_.staleness_max
    return f"mean {mean:.3g}, 99th percentile {p99}, at most {most}"


def _matrix(result: Evaluation, names: list[str]) -> list[str]:
    """Return the confusion matrix: a row for each class, a column for each prediction, dots for zeros."""
    assert result.confusion is not None
    cells = [[f"{round(count, 1):.10g}" if count else "." for count in row] for row in result.confusion]
    width = max(len(text) for text in [*names, *(cell for row in cells for cell in row)]) + 1
    left = max(len(_TRUE), *map(len, names))
    of_all = max(len(_PREDICTED), width * len(names))
    lines = [f"{_TRUE:<{left}} | {_PREDICTED:<{of_all}}  {_OF_EACH_CLASS}"]
    lines.append(" " * left + " | " + "".join(f"{name:>{width}}" for name in names))
    for name, row, scores in zip(names, cells, _of_each_class(result), strict=True):
        counts = "".join(f"{cell:>{width}}" for cell in row)
        lines.append(f"{name:<{left}} | {counts:<{of_all}}  {scores}")
    return lines


_TRUE = "true class"
_PREDICTED = "predicted as"
_OF_EACH_CLASS = "accuracy  precision      f1"


def _of_each_class(result: Evaluation) -> list[str]:
    """Return the accuracy (recall), precision and F1 score of each class."""
    figures = zip(result.class_accuracy(), result.class_precision(), result.class_f1(), strict=True)
    return [
        f"{_percent(share)}  {_percent(precision):>9}  {'-' if f1 is None else f'{f1:.4f}':>6}"
        for share, precision, f1 in figures
    ]


def _percent(share: float | None) -> str:
    return f"{'-':>8}" if share is None else f"{share:>8.2%}"


def _short(label: object) -> str:
    label = str(label)
    return label if len(label) <= WIDEST_LABEL else label[: WIDEST_LABEL - 1] + "…"
