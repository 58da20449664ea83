"""Recursive gradients: STORM and snapshots on top of an objective (MSVR v2, v3)."""

from .gradient import RecursiveGradient
from .snapshot import Snapshot

__all__ = ["RecursiveGradient", "Snapshot"]
