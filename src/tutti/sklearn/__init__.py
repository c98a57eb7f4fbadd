"""Estimators of scikit-learn over `tutti.train`."""

from tutti.sklearn.estimators import Classifier, Regressor

__all__ = ["Classifier", "Regressor"]
