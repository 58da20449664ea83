"""Classifiers of scikit-learn that train under constraints, for worst groups or for a ranking.

They are ordinary estimators: `fit(X, y, sensitive_features=...)`, `predict`, `predict_proba`,
pipelines, grid searches, cross-validation.
"""

from .estimators import AveragePrecisionClassifier, ConstrainedClassifier, WorstGroupClassifier
from .goals import ClassifierReport, Figures

__all__ = [
    "AveragePrecisionClassifier",
    "ClassifierReport",
    "ConstrainedClassifier",
    "Figures",
    "WorstGroupClassifier",
]
