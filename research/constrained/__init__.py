"""Constrained training side by side: our methods, Cooper and humancompatible-train.

`study` is the command; the other parts are problems (`fairness`, `convex`), sides
(`ours`, `cooper_side`, `hct_side`), `grids` (every setting that is tried), `training` (one run),
`jobs` (many runs), `report` (selection and tables), `cost` (time of a step), `bias` and `plots`.
"""
