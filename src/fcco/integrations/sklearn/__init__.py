"""Classifiers of scikit-learn that train under constraints, for worst groups or for a ranking.

| estimator | trains for |
|---|---|
| `ConstrainedClassifier` | accuracy, while rates or losses of groups hardly differ |
| `WorstGroupClassifier` | the average loss of the worst groups |
| `AveragePrecisionClassifier` | average precision |

They are ordinary estimators: `fit(X, y, sensitive_features=...)`, `predict`, `predict_proba`,
pipelines, grid searches, cross-validation. The extra `fcco[sklearn]` installs what they need.
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
