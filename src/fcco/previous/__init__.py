"""The parameters before the last optimizer step, and evaluation there."""

from .parameters import PreviousParameters, after_closure, parameters_of, unwrap

__all__ = ["PreviousParameters", "after_closure", "parameters_of", "unwrap"]
