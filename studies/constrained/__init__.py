"""Constrained training side by side: our methods, Cooper and humancompatible-train.

The command is `python -m studies.constrained`; the other parts are problems (`fairness`, `convex`),
sides (`ours`, `peers`), `grids` (every setting that is tried), `training` (one run), `report`
(selection and tables) and `bias`.
"""
