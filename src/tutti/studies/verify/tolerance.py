"""The job of a comparison with sequential training, and its verdict.

Needs no torch: the launching process imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from tutti.errors import NotFinite
from tutti.run.jobs import Job

DTYPES: Final = {"float32": "fp32", "float64": "fp64"}
"""The dtypes of a comparison, and the values of --precision."""

TOLERANCES = {
    "float32": {"loss": 1e-5, "gradient": 1e-4, "weights": 1e-5},
    "float64": {"loss": 1e-12, "gradient": 1e-11, "weights": 1e-12},
}
"""Relative deviations up to these always count as rounding. Gradients feel each rounding of the weights."""

MOST = {"float32": 1e-2, "float64": 1e-6}
"""With more rounding than this the comparison says nothing."""

AMPLE = 10.0
"""Deviations up to AMPLE times the rounding count as rounding."""


@dataclass(frozen=True)
class VerifyJob(Job):
    """A comparison of parallel with sequential training, for `config.steps` steps."""

    entry: ClassVar[str] = "tutti.studies.verify.follow:work"

    dtype: str  # of `DTYPES`


@dataclass
class Distance:
    """The relative distance of a quantity between two runs: the norm of the difference / the norm."""

    largest: float = 0.0  # over all steps
    step: int = 1  # of the largest distance, from 1
    first: float = 0.0  # in the first step

    def note(self, step: int, difference: float, size: float) -> None:
        """Take one comparison into account; raise NotFinite if nothing is left to compare."""
        relative = difference / size if size else difference
        if not relative < float("inf"):
            raise NotFinite(
                f"a run is no longer finite in step {step}, so there is nothing to compare; lower --lr"
            )
        if step == 1:
            self.first = relative
        if relative > self.largest:
            self.largest, self.step = relative, step


@dataclass
class Deviation:
    """The distance of a quantity between the parallel and the sequential run, and that by rounding alone.

    Some models and optimizers amplify rounding from step to step. So the sequential run is repeated in two
    ways that change only the rounding. Nothing is amplified in the first step: if loss or gradient differ
    there, the cause is not rounding.
    """

    tolerance: float  # from `TOLERANCES`
    most: float  # from `MOST`
    found: Distance = field(default_factory=Distance)  # of the parallel run from the sequential run
    reordered: Distance = field(default_factory=Distance)  # of the run with reordered batches
    added_up: Distance = field(default_factory=Distance)  # of the run that adds up the parts of each batch

    @property
    def rounding(self) -> float:
        """The distance that rounding alone made.

        If adding up parts changed more than rounding, the whole is no sum of its parts: that does not count.
        """
        parts = self.added_up.largest if self.added_up.first <= self.allowed_at_first else 0.0
        return max(self.reordered.largest, parts)

    @property
    def allowed(self) -> float:
        """The largest distance that rounding explains."""
        return self._allowed(self.rounding)

    @property
    def allowed_at_first(self) -> float:
        """The largest distance that rounding explains in the first step."""
        return self._allowed(self.reordered.first)

    @property
    def drowned(self) -> bool:
        """True if rounding is too large for the comparison to say anything."""
        return AMPLE * self.rounding > self.most

    def _allowed(self, rounding: float) -> float:
        return max(self.tolerance, min(self.most, AMPLE * rounding))


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison; equal on all ranks."""

    deviations: dict[str, Deviation]  # of loss, gradient and weights
    reasons: tuple[str, ...] = ()  # why the two differ by design
    causes: tuple[str, ...] = ()  # why they differ by mistake

    @property
    def follows(self) -> bool:
        """True if rounding explains every deviation."""
        return not self.at_once and all(one.found.largest <= one.allowed for one in self.deviations.values())

    @property
    def at_once(self) -> bool:
        """True if loss or gradient deviate in the first step by more than rounding explains.

        The weights may: the first step of Adam makes a full step of the smallest gradient.
        """
        first = (self.deviations[name] for name in ("loss", "gradient"))
        return any(one.found.first > one.allowed_at_first for one in first)


def deviations(dtype: str) -> dict[str, Deviation]:
    """Return an empty deviation for each quantity."""
    return {name: Deviation(tolerance, MOST[dtype]) for name, tolerance in TOLERANCES[dtype].items()}


def table(verdict: Verdict) -> str:
    """Return the figures, one quantity a line."""
    lines = [
        f"{'':10} {'largest relative deviation':>26} {'at step':>8} {'allowed':>9} {'rounding alone':>15}"
    ]
    for name, one in verdict.deviations.items():
        found, rounding = one.found, one.rounding
        lines.append(
            f"{name:10} {found.largest:>26.2e} {found.step:>8} {one.allowed:>9.1e} {rounding:>15.1e}"
        )
    return "\n".join(lines)


def describe(verdict: Verdict, dtype: str) -> str:
    """Return the verdict in words."""
    if verdict.follows:
        return "verdict: parallel training follows sequential training"
    if verdict.reasons and not verdict.causes:
        by_design = "\n  ".join(verdict.reasons)
        return f"verdict: parallel training differs from sequential training by design:\n  {by_design}"
    drowned = any(one.drowned for one in verdict.deviations.values())
    if drowned and not verdict.causes and not verdict.at_once:
        remedy = "lower --lr, or compare fewer --steps"
        remedy += "" if dtype == "float64" else ", or with --dtype float64"
        return f"verdict: none: this training amplifies rounding too much to say anything; {remedy}"
    causes = verdict.causes
    if not causes:
        when = "loss or gradient differ from the first step on, so it is not rounding"
        late = "they differ by more than rounding, and no cause was found in model and loss"
        causes = (when if verdict.at_once else late,)
    return "\n  ".join(["verdict: parallel training does NOT follow sequential training:", *causes])
