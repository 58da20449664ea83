"""Non-smooth coupled compositional optimisation for PyTorch."""

__version__ = "0.1.0"
