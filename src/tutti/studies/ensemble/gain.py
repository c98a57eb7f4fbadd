"""The gain of an ensemble on new samples, with an interval from samples that are drawn anew.

The networks are those that will be used, and what is left to chance is which samples they meet: so the
interval is that of the paired bootstrap over samples (Efron and Tibshirani 1993). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tutti.records.predictions import Predictions
from tutti.studies.cross_validation.scores import MEASURES
from tutti.studies.cross_validation.significance import CONFIDENCE, amount_of

DRAWS: Final = 1000


@dataclass(frozen=True)
class Gain:
    """The gain over single networks.

    Attributes:
        metric: of the scores.
        ensemble: its score.
        single: the mean of the scores of single networks.
        networks: how many these are.
        low: the lower end of the interval of the difference.
        high: the upper one.
    """

    metric: str
    ensemble: float
    single: float
    networks: int
    low: float
    high: float

    @property
    def sentence(self) -> str:
        """The result in words."""
        ends = [amount_of(end, self.metric).split(" ")[0] for end in (self.low, self.high)]
        of = f" (the mean of {self.networks} networks)" if self.networks > 1 else ""
        return (
            f"the ensemble has {self.metric} {self._shown(self.ensemble)}, and the best single model "
            f"{self._shown(self.single)}{of}: a difference of "
            f"{amount_of(self.ensemble - self.single, self.metric)}, {100 * CONFIDENCE:.0f} % interval "
            f"{ends[0]} to {ends[1]}, by paired bootstrap over samples"
        )

    def _shown(self, score: float) -> str:
        return f"{score:.2%}" if MEASURES[self.metric].share else f"{score:.4g}"


def gain_of(
    ours: Predictions, theirs: Sequence[Predictions], metric: str, amounts: bool, flags: bool = False
) -> Gain:
    """Compare an ensemble with single networks on the same samples.

    Args:
        ours: the ensemble's predictions.
        theirs: those of each network.
        metric: a name in `MEASURES`, or "auto".
        amounts: a single output approaches the class number itself.
        flags: each output is a logit of its own.
    """
    whole = ours.targets.dtype.kind in "iu"
    metric = ("accuracy" if whole else "mae") if metric == "auto" else metric
    measure = MEASURES[metric].function
    outputs = [MEASURES[metric].rows_of(one, amounts, flags) for one in (ours, *theirs)]

    def scores(drawn: NDArray[np.int64]) -> tuple[float, float]:
        found = [measure(output[drawn], targets[drawn]) for output, targets in outputs]
        return found[0], float(np.mean(found[1:]))

    def difference(drawn: NDArray[Any]) -> float:
        ensemble, single = scores(drawn)
        return ensemble - single

    every = np.arange(len(outputs[0][1]))
    ensemble, single = scores(every)
    ends = stats.bootstrap(
        (every,),
        difference,
        n_resamples=DRAWS,
        vectorized=False,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=0,
    ).confidence_interval
    return Gain(metric, ensemble, single, len(theirs), float(ends.low), float(ends.high))
