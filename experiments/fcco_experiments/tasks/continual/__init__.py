"""Continual learning: fine-tune an image-text model on a new class, forget none of the old ones."""

from .task import TASK as TASK

__all__ = ["TASK"]
