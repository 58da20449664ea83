"""Our scikit-learn estimator and fairlearn's methods under the same fairness constraints.

`python -m studies.estimators` is the command. `tables` holds the data, `methods` what is
compared, `training` one run.
"""
