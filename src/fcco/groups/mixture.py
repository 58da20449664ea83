"""Mixture weights: how much of each group an objective wants, averaged over a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._distributed import find_group
from .._files import atomic
from .._state import KeepsPrecision


class Mixture(KeepsPrecision):
    r"""The shares of the groups in the gradient of an objective, averaged over a run.

    .. math::
        \bar q = \frac1T\sum_t q_t, \qquad q_{t,i} \propto b_i + [c_{t,i}]_+

    c_i is the weight of group i (`CVaRGroupDRO`, `methods.ooa`) or the multiplier of its limit
    (`constrained`), b_i its share of the ordinary loss. To draw samples by q and to take their
    plain mean has the same gradient on average as to weigh the means of the groups by q.

    Call `update()` after each step, or each few. Steps before every group was seen do not count.
    The state is a state dict of its own; all ranks have the same.

    Args:
        objective: of groups or limits, which have names or are numbered.
        loss: for limits, what the ordinary loss is the loss of: shares by name, of the groups
            themselves or of others, such as `{"target": 1.0}`.

    Example:
        >>> import fcco, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> objective = fcco.CVaRGroupDRO(model, optimizer, ratio=0.5, names=["de", "en"])
        >>> x = torch.arange(4.0)[:, None]
        >>> objective(lambda: (model(x)[:, 0] - 1) ** 2, [0, 0, 1, 1]).backward()
        >>> optimizer.step()
        >>> mixture = fcco.groups.Mixture(objective)
        >>> mixture.update()
        tensor([0.4975, 0.5025])
        >>> {name: round(share, 3) for name, share in mixture.shares().items()}
        {'de': 0.498, 'en': 0.502}
    """

    mean: Tensor
    base: Tensor
    steps: Tensor
    never_negative = ("mean", "steps")

    def __init__(self, objective: Any, loss: Mapping[str, float] | None = None) -> None:
        super().__init__()
        term, own = objective.term, dict(loss or {})
        for name, share in own.items():
            _checks.at_least("Mixture", f"loss[{name!r}]", share, 0.0)
        if not sum(own.values()) and (own or term.beside_loss):
            raise ValueError(
                "`Mixture(loss=...)` must say whose loss the limits stand beside, by name: "
                "{'target': 1.0}, or the shares of several."
            )
        self._term = (term,)  # a tuple hides it: it has a state of its own
        groups = list(map(str, term.names or range(term.tracker.num_inner)))
        self.names = (*groups, *(name for name in own if name not in groups))
        given = [own.get(name, 0.0) / (sum(own.values()) or 1) for name in self.names]
        self.register_buffer("base", term.tracker.value.new_tensor(given), persistent=False)
        self.register_buffer("mean", torch.zeros_like(self.base))
        self.register_buffer("steps", torch.zeros_like(self.base[0]))

    @torch.no_grad()
    def update(self) -> Tensor:
        """Count the present weights, and return the shares; NaN before each group was seen."""
        weights = self._term[0].group_weights().to(self.base).clamp(min=0)
        found = self.base.clone()
        found[: len(weights)] += weights
        found = found / found.sum()
        known = ~found.isnan().any()
        self.steps += known
        self.mean += torch.where(known, found - self.mean, 0) / self.steps.clamp(min=1)
        return found

    def shares(self) -> dict[str, float]:
        """The average of each share."""
        if not self.steps:
            raise ValueError("There are no shares: no `update()` since all groups were seen.")
        mean = self.mean.cpu().double()  # samplers want a sum of 1 to 1e-8
        return dict(zip(self.names, (mean / mean.sum()).tolist(), strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shares as JSON, {name: share}, on the first rank."""
        group, content = find_group(), json.dumps(self.shares(), indent=1, ensure_ascii=False)
        if group is None or group.rank == 0:
            with atomic(Path(path)) as file:
                file.write(content.encode() + b"\n")
