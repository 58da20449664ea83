"""Our scikit-learn estimator, fairlearn and OxonFair under the same fairness constraints."""
