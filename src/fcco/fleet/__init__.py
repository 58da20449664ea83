"""Many training runs as one program.

A run is a `Member`: a model, an optimizer and an objective, as you would train it alone. A `Fleet`
steps many of them together. The step of one run (`program.step_one_run`) is an estimator of the
gradient and an update of the weights, made of the library's own pure functions; `torch.func.vmap`
maps it over all runs.

| module | idea |
|---|---|
| `fleet` | all runs: state, steps, checkpoints |
| `member` | from ordinary objects to a method, its numbers and its state |
| `run` | one run in one step: passes of the user's function |
| `coupled`, `cvar`, `group_weights`, `switching`, `lagrangian` | estimators of the gradient |
| `pairs` | inner values from pairs of scores |
| `updates` | updates of the weights, rounds |
| `hyperparameters` | the numbers of all runs, as tensors |
| `program` | the step of one run, and ways to execute it for all |
"""

from .fleet import Fleet
from .member import Member, group_members, signature_of
from .run import Unsupported

__all__ = ["Fleet", "Member", "Unsupported", "group_members", "signature_of"]
