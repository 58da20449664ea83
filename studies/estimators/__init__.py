"""Our scikit-learn estimator and fairlearn's methods under the same fairness constraints."""
