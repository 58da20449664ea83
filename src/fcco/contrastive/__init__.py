"""Contrastive learning against all pairs of a data set, from small batches."""

from .kernel import log_means
from .objective import ContrastiveTerm, GlobalContrastive

__all__ = ["ContrastiveTerm", "GlobalContrastive", "log_means"]
