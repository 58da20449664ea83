"""Weights on groups that an adversary moves, and the term that uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..outer import CVaR
from ..rules.arrays import tensor
from ..rules.group_weights import Geometry, Scaling, ascend, block_factor
from ..tracker import InnerTracker, Tracked
from .base import AbstractTerm


class GroupWeights(AbstractTerm):
    r"""The losses of groups with online weights (OOA).

    For the update and the settings see `fcco.methods.Ooa`. The buffer `weights` holds p of the last
    finished optimizer step. Several batches before a step move p once: it is computed anew from
    `weights` and the losses of all of them together.

    Args:
        tracker: the losses of the groups in the batch: `ema_tracker(n, gamma=1.0, read="new")`.
        rate: eta_p.
        ratio: r; p_i <= 1/(r n). 1/n leaves p free, 1 keeps it uniform.
        geometry: see `Ooa`, as for `scaling` and `offset`.
    """

    weights: Tensor
    geometry: Geometry
    scaling: Scaling

    def __init__(
        self,
        tracker: InnerTracker,
        rate: float,
        ratio: float,
        *,
        geometry: Geometry = "kl",
        scaling: Scaling = "unbiased",
        offset: float | None = None,
    ) -> None:
        call, number = type(self).__name__, tracker.num_inner
        _checks.positive(call, "rate", rate)
        _checks.in_interval(call, "ratio", ratio, 0.0, 1.0, open_low=True)
        _checks.one_of(call, "geometry", geometry, ("kl", "euclidean"))
        _checks.one_of(call, "scaling", scaling, ("unbiased", "batch"))
        if offset is not None:
            _checks.positive(call, "offset", offset)
        if tracker.dim != 1 or tracker.log_space or tracker.read != "new":
            raise ValueError(f"`{call}(tracker=...)` must have dim=1, read='new', no log.")
        super().__init__(tracker)
        self.branch_free = True
        self.rate, self.ratio, self.geometry, self.scaling = rate, ratio, geometry, scaling
        self.offset, self.cap = offset, min(1.0, 1 / (ratio * number))
        self.register_buffer("weights", torch.full_like(tracker.value[:, 0], 1 / number))

    def loss(self, tracked: Tracked) -> Tensor:
        """The estimate of sum_i p_i g_i from the sampled groups."""
        index, step, weights = tracked.index, tracked.step, self.weights
        if step is not None and index.shape[0]:
            # From where the step began, along the losses of all groups seen in it.
            batch = step.updates[self.tracker].batch
            groups, losses = tensor(batch.index), tensor(step.updates[self.tracker].visit.after)
            came = torch.ones_like(groups, dtype=torch.bool)
            came = came if batch.present is None else batch.filled(batch.present)
            present = torch.zeros_like(weights, dtype=torch.bool).index_copy(0, groups, came)
            losses = torch.zeros_like(weights).index_copy(0, groups, losses)
            factor = block_factor(self.scaling, len(weights), batch.number)
            settings = (self.rate, self.cap, self.geometry, factor, self.offset)
            weights = ascend(weights, losses, present, *settings)
            step.write(self, self.weights.copy_, weights)  # type: ignore[arg-type]
        slope = weights[index] * block_factor(self.scaling, len(weights), tracked.number)
        parts = slope * tracked.value
        parts = parts if tracked.present is None else torch.where(tracked.present, parts, 0)
        return tracked.as_loss(parts.sum(), slope)

    def group_weights(self) -> Tensor:
        """The current p of the groups."""
        return self.weights.clone()

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        weights = state.get("weights", self.weights)
        if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > 1e-3:
            raise ValueError("`weights` must be at least 0 and sum to 1.")

    def value(self) -> Tensor:
        """CVaR of the losses last seen, the value that the best p gives; NaN before the first."""
        table = self.table()
        return CVaR(self.ratio)(table) if len(table) else table.new_tensor(torch.nan)
