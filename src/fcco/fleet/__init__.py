"""Many training runs as one program.

A run is a `Member`: a model, an optimizer and an objective, as you would train it alone. A `Fleet`
steps many of them together. The step of one run (`program.step_one_run`) is an estimator of the
gradient and an update of the weights; both call `fcco.rules`, as one run alone does, and
`torch.func.vmap` maps it over all runs.
"""

from .fleet import Fleet
from .member import Member, group_members, signature_of
from .run import Unsupported

__all__ = ["Fleet", "Member", "Unsupported", "group_members", "signature_of"]
