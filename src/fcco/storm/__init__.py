"""Recursive gradients: STORM and snapshots on top of an objective (MSVR v2, v3)."""

from .gradient import RecursiveGradient as RecursiveGradient
from .snapshot import Snapshot as Snapshot

__all__ = ["RecursiveGradient", "Snapshot"]
