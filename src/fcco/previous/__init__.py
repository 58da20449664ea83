"""The parameters before the last optimizer step, and evaluation there."""

from .parameters import ParameterTensors, PreviousParameters, after_closure, parameters_of, unwrap

__all__ = ["ParameterTensors", "PreviousParameters", "after_closure", "parameters_of", "unwrap"]
