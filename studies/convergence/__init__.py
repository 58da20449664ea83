"""Samples to each accuracy, on small problems whose solution is known."""
