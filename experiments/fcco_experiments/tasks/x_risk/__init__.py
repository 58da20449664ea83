"""X-risks: average precision, partial AUC and NDCG, on rare classes and on lists."""

from .config import XRisk
from .task import TASK, XRiskTask

__all__ = ["TASK", "XRisk", "XRiskTask"]
