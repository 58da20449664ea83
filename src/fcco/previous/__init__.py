"""The parameters before the last optimizer step, and evaluation there."""

from .parameters import ParameterTensors as ParameterTensors
from .parameters import PreviousParameters as PreviousParameters
from .parameters import after_closure as after_closure
from .parameters import parameters_of as parameters_of
from .parameters import unwrap as unwrap

__all__ = [
    "ParameterTensors",
    "PreviousParameters",
    "after_closure",
    "parameters_of",
    "unwrap",
]
