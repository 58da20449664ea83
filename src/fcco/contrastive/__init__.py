"""Contrastive learning against all pairs of a data set, from small batches.

`ContrastiveTerm` is the global contrastive loss as a coupled term, `GlobalContrastive` the
objective with this term alone, `log_means` the inner values of a batch.
"""

from .kernel import log_means
from .objective import ContrastiveTerm, GlobalContrastive

__all__ = ["ContrastiveTerm", "GlobalContrastive", "log_means"]
