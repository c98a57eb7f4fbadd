"""The parameter centre: vectors of weights that all workers see, and the rule by which messages move them."""

from __future__ import annotations

from tutti.centre.base import Centre, Desk, Outcome, Receipt, Rule, Slot, Vectors
from tutti.centre.joining import join_centre, serve, visitors
from tutti.centre.moving import AddRule, ElasticRule
from tutti.centre.optimizing import OptimizerRule
from tutti.centre.remedies import AdaptiveCompensation, Compensation, Damping, Remedy
from tutti.centre.rounds import Rounds

__all__ = [
    "AdaptiveCompensation",
    "AddRule",
    "Centre",
    "Compensation",
    "Damping",
    "Desk",
    "ElasticRule",
    "OptimizerRule",
    "Outcome",
    "Receipt",
    "Remedy",
    "Rounds",
    "Rule",
    "Slot",
    "Vectors",
    "join_centre",
    "serve",
    "visitors",
]
