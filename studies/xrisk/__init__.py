"""Ours, LibAUC and plain losses on the metrics that X-risks stand for.

`python -m studies.xrisk` is the command. `problems` holds data and metrics, `methods` what is
compared, `training` one run, `speed` the time and memory of a step.
"""
