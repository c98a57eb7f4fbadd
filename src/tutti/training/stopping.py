"""Rules that say when a run has trained enough, in words. Needs no torch.

    rule       = condition, { "or", condition }
    condition  = [ "after", N, "epochs" ], quantity, ( limit | standstill )
    limit      = relation, number
    standstill = "not", direction, "for", N, "epochs"
    quantity   = "training" | "validation", "loss" or the name of a metric
    relation   = "<" | "<=" | ">" | ">="
    direction  = "better" | "lower" | "higher"

A rule is a function of the epochs so far and of nothing else. It remembers nothing, so a run that is resumed
stops where one that was never interrupted does.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, NoReturn, TypeAlias

from tutti.errors import BadOption, UnknownName
from tutti.records.run import EpochRecord
from tutti.records.texts import is_share, metric_text

Better: TypeAlias = Mapping[str, str | None]
"""The loss and the metrics of a run: whether lower or higher values are "better"; None: nobody has said."""

LOSS: Final = "loss"

VALIDATION: Final = "validation"

PARTS: Final = ("training", VALIDATION)

RELATIONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

DIRECTIONS: Final = ("better", "lower", "higher")

_EXAMPLE: Final = (
    "write a rule such as 'validation loss not better for 4 epochs' or 'training accuracy >= 0.97', or "
    "several, joined by 'or'"
)

_WORD: Final = re.compile(r"[<>]=?|,|[\d.]+\s*%|[^\s<>,]+")
_COUNT: Final = re.compile(r"[0-9]{1,9}")
_NUMBER: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]{1,4})?", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """A figure of every epoch.

    Attributes:
        part: of the data: one of `PARTS`.
        metric: its name, or "loss".
    """

    part: str
    metric: str

    def __str__(self) -> str:
        return f"{self.part} {self.metric}"

    def of(self, record: EpochRecord) -> float | None:
        """Return its value; None where it was not computed."""
        evaluation = record.validation if self.part == VALIDATION else record.train
        if evaluation is None:
            return None
        return evaluation.loss if self.metric == LOSS else evaluation.metrics.get(self.metric)

    def text(self, value: float) -> str:
        """Return a value of it as it is shown."""
        return metric_text(self.metric, value)


@dataclass(frozen=True)
class Ranking:
    """An order of epochs.

    Attributes:
        quantity: by which they are compared.
        higher: whether higher values of it are better.
    """

    quantity: Quantity
    higher: bool

    def best(self, history: Iterable[EpochRecord]) -> EpochRecord | None:
        """Return the best epoch, of equally good ones the first; None where no epoch has a value."""
        found, best = None, math.nan
        for record in history:
            value = self.quantity.of(record)
            if value is not None and self.is_better(value, best):
                found, best = record, value
        return found

    def score(self, record: EpochRecord) -> float | None:
        """Return a number that is the higher the better the epoch is; None where there is no value."""
        value = self.quantity.of(record)
        return -value if value is not None and not self.higher else value

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one. Every number is better than NaN."""
        if math.isnan(other):
            return not math.isnan(value)
        return value > other if self.higher else value < other


@dataclass(frozen=True)
class Limit:
    """A condition such as "validation accuracy >= 0.97".

    Attributes:
        quantity: what is compared.
        relation: one of `RELATIONS`.
        number: with what it is compared.
    """

    quantity: Quantity
    relation: str
    number: float

    def __str__(self) -> str:
        return f"{self.quantity} {self.relation} {self.number!r}"

    @property
    def direction(self) -> str | None:
        """None: a limit does not say which values are better."""
        return None

    def why(self, history: Sequence[EpochRecord], after: int, better: Better) -> str | None:
        """Return why to stop, as a clause; None: it has not been so in any epoch from number `after` on."""
        for record in history:
            value = self.quantity.of(record)
            if record.epoch >= after and value is not None and RELATIONS[self.relation](value, self.number):
                shown = self.quantity.text(value)
                return f"{self.quantity} was {shown} in epoch {record.epoch}, {self.relation} {self.number!r}"
        return None


@dataclass(frozen=True)
class Standstill:
    """A condition such as "validation loss not better for 4 epochs".

    Attributes:
        quantity: what does not move.
        direction: one of `DIRECTIONS`.
        epochs: so many in a row, none of them better than the best one before them.
    """

    quantity: Quantity
    direction: str
    epochs: int

    def __str__(self) -> str:
        return f"{self.quantity} not {self.direction} for {_epochs(self.epochs)}"

    def why(self, history: Sequence[EpochRecord], after: int, better: Better) -> str | None:
        """Return why to stop, as a clause; None: it has not been so in any epoch from number `after` on."""
        meant = better.get(self.quantity.metric) if self.direction == "better" else self.direction
        ranking = Ranking(self.quantity, meant == "higher")
        best: float | None = None
        reached, idle = 0, 0
        for record in history:
            value = self.quantity.of(record)
            if value is None:
                continue
            if best is None or ranking.is_better(value, best):
                best, reached, idle = value, record.epoch, 0
            else:
                idle += 1
            if idle >= self.epochs and record.epoch >= after:
                return (
                    f"{self.quantity} was not {self.direction} than in epoch {reached} "
                    f"({self.quantity.text(best)}) for {_epochs(idle)}"
                )
        return None


@dataclass(frozen=True)
class Criterion:
    """A condition, and from when on it counts.

    Attributes:
        what: the condition itself.
        after: epochs that are trained in any case; 0: none.
    """

    what: Limit | Standstill
    after: int = 0

    def __str__(self) -> str:
        return f"after {_epochs(self.after)} {self.what}" if self.after else str(self.what)


@dataclass(frozen=True)
class StopRule:
    """Conditions, of which one is enough to stop. As a text, it is parsed to itself.

    Attributes:
        conditions: at least one.
    """

    conditions: tuple[Criterion, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.conditions))

    @classmethod
    def parse(cls, text: str) -> StopRule:
        """Parse a rule; its metrics may be any.

        Raises:
            BadOption: the text is no rule; the message says where, and what is expected there.
        """
        return _RuleParser(text).rule()

    def check(self, better: Better, validated: bool) -> None:
        """Refuse figures that no epoch of a run will have.

        Args:
            better: what the run computes.
            validated: whether it has a validation part.

        Raises:
            UnknownName: a metric that is not computed.
            BadOption: the validation of a run without one, or "better" where nobody has said what is better.
        """
        for condition in self.conditions:
            quantity, direction = condition.what.quantity, condition.what.direction
            if quantity.metric not in better:
                hint = "Others are computed if --metrics names them."
                raise UnknownName("metric", quantity.metric, better, hint, of="--stop")
            if quantity.part == VALIDATION and not validated:
                raise BadOption(
                    f"--stop is about the {quantity}, but there are no samples for validation; keep some "
                    f"with --validation 0.1, or write 'training {quantity.metric}'"
                )
            if direction == "better" and better[quantity.metric] is None:
                raise BadOption(
                    f"--stop is '{self}', but nobody has said which values of '{quantity.metric}' are "
                    "better; write 'not lower' or 'not higher' there"
                )

    def why(self, history: Sequence[EpochRecord], better: Better) -> str | None:
        """Return why to stop after these epochs, as a clause; None: go on.

        Once there is a reason there is one for ever, whatever epochs follow.

        Args:
            history: the epochs so far, in order. Those whose validation is not known yet are left out, and
                come later.
            better: what the run computes.
        """
        for condition in self.conditions:
            reason = condition.what.why(history, condition.after, better)
            if reason is not None:
                return reason
        return None


@dataclass(frozen=True)
class Ending:
    """The end of a run, as far as the figures of its epochs decide it.

    Attributes:
        rule: it ends early by this one; None: not by any.
        better: what the run computes.
        validated: whether it has a validation part.
        restores_best: whether its final weights are those of the best epoch.
        told: ask others after each epoch why the run is to end with it (collective).

    Raises:
        UnknownName, BadOption: the rule is about figures that the run does not have.
    """

    rule: StopRule | None = None
    better: Better = field(default_factory=dict)
    validated: bool = True
    restores_best: bool = False
    told: tuple[Callable[[], str | None], ...] = ()

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.rule.check(self.better, self.validated)

    def why(self, history: Sequence[EpochRecord]) -> str | None:
        """Return why to end after these epochs, as a clause; None: go on (collective)."""
        found = None if self.rule is None else self.rule.why(history, self.better)
        told = [why() for why in self.told]
        return found or next(filter(None, told), None)

    @property
    def ranking(self) -> Ranking:
        """The order of its epochs.

        It is by the first figure of the rule of which it is known which values are better; without one, by
        the loss on the validation part, or on the training samples where there is none.
        """
        for condition in () if self.rule is None else self.rule.conditions:
            said = self.better[condition.what.quantity.metric] or condition.what.direction
            if said is not None:
                return Ranking(condition.what.quantity, said == "higher")
        return Ranking(Quantity(VALIDATION if self.validated else "training", LOSS), higher=False)


class _RuleParser:
    """The words of a rule, taken from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._words, self._at = text, _WORD.findall(text), 0

    def rule(self) -> StopRule:
        conditions = [self._condition()]
        while self._at < len(self._words):
            self._expect("or")
            conditions.append(self._condition())
        return StopRule(tuple(conditions))

    def _condition(self) -> Criterion:
        after = 0
        if self._take("after"):
            after = self._epochs()
            self._take(",")
        return Criterion(self._what(() if after else ("after",)), after)

    def _what(self, besides: tuple[str, ...]) -> Limit | Standstill:
        part = self._expect(*PARTS, hint=besides)
        metric = self._next
        if metric == "not" or not metric.isidentifier():
            self._refuse(f"the name of a metric, or '{LOSS}'")
        self._at += 1
        quantity = Quantity(part, metric)
        said = self._expect(*RELATIONS, "not")
        if said != "not":
            return Limit(quantity, said, self._number(quantity))
        direction = self._expect(*DIRECTIONS)
        self._expect("for")
        return Standstill(quantity, direction, self._epochs())

    def _epochs(self) -> int:
        if not _COUNT.fullmatch(self._next) or int(self._next) < 1:
            self._refuse("a whole number from 1")
        count = int(self._next)
        self._at += 1
        self._expect("epochs", "epoch")
        return count

    def _number(self, quantity: Quantity) -> float:
        digits = self._next.removesuffix("%").rstrip()
        if not _NUMBER.fullmatch(digits) or not math.isfinite(float(digits)):
            self._refuse("a number")
        # 99.9% is 0.999 to the last bit.
        number = float(Decimal(digits).scaleb(-2) if self._next.endswith("%") else digits)
        if is_share(quantity.metric) and not 0 <= number <= 1:
            self._refuse(f"a number from 0 to 1, or from 0% to 100%, as {quantity.metric} is a share,")
        self._at += 1
        return number

    @property
    def _next(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self, word: str) -> bool:
        """Take a word if it comes next; returns whether it did."""
        taken = self._next == word
        self._at += taken
        return taken

    def _expect(self, *words: str, hint: tuple[str, ...] = ()) -> str:
        """Take the next word, which is one of these; `hint`: others that could have been there."""
        word = self._next
        if word not in words:
            known = [*words, *hint]
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            listed = ", ".join(f"'{one}'" for one in known[:-1])
            expected = f"{listed} or '{known[-1]}'" if listed else f"'{known[-1]}'"
            self._refuse(expected, f" (did you mean '{near[0]}'?)" if near else "")
        self._at += 1
        return word

    def _refuse(self, expected: str, remark: str = "") -> NoReturn:
        before = " ".join(self._words[: self._at])
        place = f" behind '{before}'" if before else " first"
        found = f"is '{self._next}'{remark}" if self._next else "is nothing"
        raise BadOption(
            f"--stop is '{self._text}': {expected} is expected{place}, but there {found}; {_EXAMPLE}"
        )


def _epochs(count: int) -> str:
    return f"{count} epoch{'' if count == 1 else 's'}"
