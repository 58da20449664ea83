"""Constrained training: our methods, Cooper and humancompatible-train, all tuned."""
