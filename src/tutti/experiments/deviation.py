"""How far two runs are apart, how far rounding may take them, and what that says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from tutti.errors import NotFinite

TOLERANCES = {
    "float32": {"loss": 1e-5, "gradient": 1e-4, "weights": 1e-5},
    "float64": {"loss": 1e-12, "gradient": 1e-11, "weights": 1e-12},
}
"""Relative deviations that are always taken for rounding. Gradients feel each rounding of the weights."""

MOST = {"float32": 1e-2, "float64": 1e-6}
"""Beyond this, rounding has become so large that the comparison says nothing."""

AMPLE = 10.0
"""A deviation up to this multiple of what rounding alone does is taken for rounding."""


@dataclass
class Distance:
    """The largest relative distance of a quantity between two runs: the norm of the difference / the norm.

    Attributes:
        largest: over all steps.
        step: where it was found, from 1.
    """

    largest: float = 0.0
    step: int = 1

    def note(self, step: int, difference: float, size: float) -> None:
        """Take one comparison into account.

        Raises:
            NotFinite: there is nothing to compare any more.
        """
        relative = difference / size if size else difference
        if not relative < float("inf"):
            raise NotFinite(
                f"a run is no longer finite in step {step}, so there is nothing to compare; lower --lr"
            )
        if relative > self.largest:
            self.largest, self.step = relative, step


@dataclass
class Deviation:
    """How far a quantity of the parallel run is from that of the sequential run, and what rounding explains.

    Some models and optimizers amplify rounding from step to step. So the sequential run is made again in ways
    that change the rounding and nothing else.

    Attributes:
        tolerance: what is always taken for rounding.
        most: what rounding may come to before the comparison says nothing.
        found: between the parallel and the sequential run.
        rounding: between the sequential runs.
    """

    tolerance: float
    most: float
    found: Distance = field(default_factory=Distance)
    rounding: Distance = field(default_factory=Distance)

    @property
    def allowed(self) -> float:
        """The largest distance that rounding explains."""
        return max(self.tolerance, min(self.most, AMPLE * self.rounding.largest))

    @property
    def drowned(self) -> bool:
        """Whether rounding alone is so large that nothing can be said."""
        return AMPLE * self.rounding.largest > self.most


@dataclass(frozen=True)
class Verdict:
    """What the comparison found; equal on all ranks.

    Attributes:
        deviations: of loss, gradient and weights.
        reasons: parts of the model that make the two differ by design.
    """

    deviations: dict[str, Deviation]
    reasons: tuple[str, ...] = ()

    @property
    def follows(self) -> bool:
        """Whether every deviation is within what rounding explains."""
        return all(one.found.largest <= one.allowed for one in self.deviations.values())


def deviations(dtype: str) -> dict[str, Deviation]:
    """A deviation of each quantity, nothing noted yet, for "float32" or "float64"."""
    return {name: Deviation(tolerance, MOST[dtype]) for name, tolerance in TOLERANCES[dtype].items()}


def reasons(module: nn.Module, part: str) -> Iterator[str]:
    """What in the model makes parallel training differ from sequential training by design.

    Args:
        module: the model.
        part: the samples that are computed together, where these are not the whole batch.
    """
    parts = dict(module.named_modules())
    batch_norm = [name for name, part in parts.items() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if batch_norm:
        yield (
            f"BatchNorm ('{batch_norm[0]}') normalises with the statistics of each {part}; GroupNorm or "
            f"LayerNorm would not"
        )
    dropout = [
        name for name, part in parts.items() if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    ]
    if dropout:
        yield f"Dropout ('{dropout[0]}') draws other random numbers for each {part}; switch it off to compare"


def table(verdict: Verdict) -> str:
    """The figures, one quantity a line."""
    lines = [
        f"{'':10} {'largest relative deviation':>26} {'at step':>8} {'allowed':>9} {'rounding alone':>15}"
    ]
    for name, one in verdict.deviations.items():
        found, rounding = one.found, one.rounding.largest
        lines.append(
            f"{name:10} {found.largest:>26.2e} {found.step:>8} {one.allowed:>9.1e} {rounding:>15.1e}"
        )
    return "\n".join(lines)


def describe(verdict: Verdict, dtype: str) -> str:
    """The verdict in words."""
    if verdict.follows:
        return "verdict: parallel training follows sequential training"
    if verdict.reasons:
        by_design = "\n  ".join(verdict.reasons)
        return f"verdict: parallel training differs from sequential training by design:\n  {by_design}"
    if any(one.drowned for one in verdict.deviations.values()):
        remedy = "lower --lr, or compare fewer --steps" + (
            "" if dtype == "float64" else ", or with --dtype float64"
        )
        return f"verdict: none: this training amplifies rounding so much that nothing can be said; {remedy}"
    return "verdict: parallel training does NOT follow sequential training"
