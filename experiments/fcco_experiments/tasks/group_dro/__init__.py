"""Group DRO with CVaR, the paper's first experiment: images, texts and vectors in groups."""

from .config import GroupDRO
from .task import TASK, GroupDROTask

__all__ = ["TASK", "GroupDRO", "GroupDROTask"]
