"""Constrained training side by side: our methods, Cooper and humancompatible-train.

`study` is the command; the other parts are problems (`fairness`, `convex`), sides
(`ours`, `peers`), `grids` (every setting that is tried), `training` (one run, and many), `report`
(selection and tables), `cost` (time of a step), `bias` and `plots`.
"""
