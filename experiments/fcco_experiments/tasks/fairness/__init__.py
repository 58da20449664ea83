"""AUC maximisation under ROC fairness constraints, the paper's second experiment."""

from .config import Fairness
from .task import TASK, FairnessTask

__all__ = ["TASK", "Fairness", "FairnessTask"]
