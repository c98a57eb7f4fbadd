"""The parameter centre: vectors of weights that all workers see, and the rule by which messages move them."""

from __future__ import annotations

from tutti.parameter_server.base import Centre, Outcome, Push, Receipt, Rule, Slot, Vectors
from tutti.parameter_server.connect import join_centre, workers_of_centre
from tutti.parameter_server.rules import AddRule, ElasticRule, OptimizerRule, Rounds
from tutti.parameter_server.server import Server
from tutti.parameter_server.staleness import AdaptiveCompensation, Compensation, Damping, Remedy

__all__ = [
    "AdaptiveCompensation",
    "AddRule",
    "Centre",
    "Compensation",
    "Damping",
    "ElasticRule",
    "OptimizerRule",
    "Outcome",
    "Push",
    "Receipt",
    "Remedy",
    "Rounds",
    "Rule",
    "Server",
    "Slot",
    "Vectors",
    "join_centre",
    "workers_of_centre",
]
