"""Continual learning: fine-tune a model under the constraint that no protected task gets worse.

`ReferenceLosses` holds the losses of the model before fine-tuning; `TaskHeads` gives each
protected task parameters of its own.
"""

from .heads import TaskHeads
from .reference_losses import ReferenceLosses

__all__ = ["ReferenceLosses", "TaskHeads"]
