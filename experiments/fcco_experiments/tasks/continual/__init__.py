"""Continual learning: fine-tune an image-text model on a new class, forget none of the old ones."""

from .config import Continual
from .task import TASK, ContinualTask

__all__ = ["TASK", "Continual", "ContinualTask"]
