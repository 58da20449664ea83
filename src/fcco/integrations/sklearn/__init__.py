"""scikit-learn classifiers that train under constraints, for the worst groups or for a ranking.

| estimator | trains for |
|---|---|
| `ConstrainedClassifier` | accuracy, while rates or losses of groups differ by at most `tolerance` |
| `WorstGroupClassifier` | the average loss of the worst groups |
| `AveragePrecisionClassifier` | average precision |

They are ordinary scikit-learn estimators: `fit(X, y, sensitive_features=...)`, `predict`, pipelines,
grid searches, cross-validation. The extra `fcco[sklearn]` installs what they need.
"""

from .constrained import ConstrainedClassifier

__all__ = ["ConstrainedClassifier"]
