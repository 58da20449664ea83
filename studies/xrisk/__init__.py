"""Ours, LibAUC and plain losses on the metrics that X-risks stand for."""
