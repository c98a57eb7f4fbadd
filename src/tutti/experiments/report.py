"""What a run says about itself, as lines of text. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.records import Evaluation, Summary
from tutti.training.progress import SHARES

WIDEST_MATRIX = 20
"""Above this many classes the confusion matrix fits no page; each class names its commonest mistake."""

WIDEST_LABEL = 12


def counts(model: str, parameters: int, data: str, parts: dict[str, int], shape: Sequence[int]) -> str:
    """The line that names model and data, such as "mlp (109,386 parameters) on digits (...)"."""
    samples = ", ".join(f"{count:,} {part}" for part, count in parts.items())
    size = "x".join(map(str, shape)) or "1"
    return f"model {model}: {parameters:,} parameters\ndata {data}: {samples} samples of {size}"


def evaluation(what: str, result: Evaluation, labels: Sequence[str] = ()) -> str:
    """An evaluation as text: count, loss, metrics, and for classes the confusion matrix and their accuracy.

    Args:
        what: the part that was evaluated.
        result: the evaluation.
        labels: names of the classes; by default their numbers.
    """
    metrics = [f"{name} {metric(name, value)}" for name, value in result.metrics.items()]
    head = ", ".join([f"{what}: {result.samples:,} samples", *metrics, f"loss {result.loss:.4g}"])
    if result.confusion is None:
        return head
    names = [_short(labels[k]) if k < len(labels) else str(k) for k in range(len(result.confusion))]
    table = _matrix if len(names) <= WIDEST_MATRIX else _mistakes
    return head + "\n\n" + "\n".join(table(result, names))


def metric(name: str, value: float) -> str:
    """A metric as text: shares of the samples in percent."""
    return f"{value:.2%}" if name in SHARES else f"{value:.4g}"


def speed(summary: Summary) -> str:
    """How fast the training was."""
    world = summary.world
    ranks = f"{world.ranks} rank{'' if world.ranks == 1 else 's'}"
    epochs = f"{summary.epochs} epoch{'' if summary.epochs == 1 else 's'}"
    return (
        f"trained {summary.steps:,} steps ({epochs}) on {ranks} "
        f"in {summary.seconds:.1f} s: {summary.samples_per_s:,.0f} samples/s"
    )


def _matrix(result: Evaluation, names: list[str]) -> list[str]:
    """Rows are the classes, columns what the model took them for; empty cells are dots."""
    assert result.confusion is not None
    cells = [[str(count) if count else "." for count in row] for row in result.confusion]
    width = max(len(text) for text in [*names, *(cell for row in cells for cell in row)]) + 1
    left = max(len("class"), *map(len, names))
    lines = [f"{'class':<{left}} {'taken for':<{width * len(names)}}  accuracy"]
    lines.append(" " * left + " " + "".join(f"{name:>{width}}" for name in names))
    for name, row, share in zip(names, cells, result.class_accuracy(), strict=True):
        lines.append(
            f"{name:<{left}} " + "".join(f"{cell:>{width}}" for cell in row) + f"  {_percent(share)}"
        )
    return lines


def _mistakes(result: Evaluation, names: list[str]) -> list[str]:
    """One line for each class: samples, accuracy, and the class that it was most often mistaken for."""
    assert result.confusion is not None
    left = max(len("class"), *map(len, names))
    lines = [f"{'class':<{left}} {'samples':>8}  accuracy  most often mistaken for"]
    for k, (name, share) in enumerate(zip(names, result.class_accuracy(), strict=True)):
        row = result.confusion[k]
        wrong, other = max(((count, j) for j, count in enumerate(row) if j != k), default=(0, k))
        mistaken = f"{names[other]} ({wrong})" if wrong else "-"
        lines.append(f"{name:<{left}} {sum(row):>8,}  {_percent(share)}  {mistaken}")
    return lines


def _percent(share: float | None) -> str:
    return f"{'-':>8}" if share is None else f"{share:>8.2%}"


def _short(label: str) -> str:
    return label if len(label) <= WIDEST_LABEL else label[: WIDEST_LABEL - 1] + "…"
