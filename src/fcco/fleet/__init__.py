"""Thousands of training runs as one program.

A run is a `Member`: a model, an optimizer and an objective, as you would train it alone. A `Fleet`
steps many of them together. The step of one run is written once, in the library's own rules, and
`torch.func.vmap` makes it that of all.

| module | idea |
|---|---|
| `member`, `reading` | from ordinary objects to rules, numbers and state |
| `plain`, `penalty`, `lagrangian`, `switching`, `groups` | estimators: the gradient of one run |
| `updates` | what steps its weights |
| `program`, `stepper` | one function of tensors, and ways to run it |
| `fleet` | all runs: state, steps, checkpoints |
| `memory` | how many fit |
"""

from .fleet import Fleet as Fleet
from .member import Member as Member
from .member import Unsupported as Unsupported
from .reading import groups as groups

__all__ = ["Fleet", "Member", "Unsupported", "groups"]
